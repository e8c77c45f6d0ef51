"""The CPU lane as numba compiles it for processors that have less than this one."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from support.kept_builds import kept_builds

from localmoe.kernels.cpu.processor import HAS_AVX512

JOB = Path(__file__).with_name("lane_job.py")

AVX2, AVX512 = "+avx,+avx2,+fma", "+avx,+avx2,+fma,+avx512f,+avx512bw"
WITH_AVX512 = pytest.mark.skipif(not HAS_AVX512, reason="this processor has no AVX-512")


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names of x86 processors")
@pytest.mark.parametrize(
    ("name", "features", "forms"),
    [
        ("haswell", AVX2, "bf12"),
        ("haswell", AVX2, "plain mxfp4"),
        ("haswell", AVX2, "fp8"),
        ("haswell", AVX2, "nvfp4"),
        ("haswell", AVX2, "int4 int4-32"),
        ("haswell", "", "mxfp4 bf12"),
        ("haswell", "", "fp8"),
        ("haswell", "", "nvfp4"),
        ("haswell", "", "int4 int4-32"),
        pytest.param("skylake-avx512", AVX512, "mxfp4 bf12", marks=WITH_AVX512),
        pytest.param("skylake-avx512", AVX512, "fp8", marks=WITH_AVX512),
        pytest.param("skylake-avx512", AVX512, "nvfp4", marks=WITH_AVX512),
        pytest.param("skylake-avx512", AVX512, "int4 int4-32", marks=WITH_AVX512),
    ],
    ids=[
        "avx2", "avx2, other forms", "avx2, fp8", "avx2, nvfp4", "avx2, int4", "no look-up",
        "no look-up, fp8", "no look-up, nvfp4", "no look-up, int4", "no bfloat16", "no bfloat16, fp8",
        "no bfloat16, nvfp4", "no bfloat16, int4",
    ],
)  # fmt: skip
@pytest.mark.slow
def test_the_sums_are_right(name: str, features: str, forms: str, pytestconfig: pytest.Config) -> None:
    kept = kept_builds(pytestconfig, f"lane-{name}-{'vectors' if features else 'plain'}-{forms[:4]}")
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(kept),
    }
    done = subprocess.run(
        [sys.executable, str(JOB), *forms.split()],
        env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found["errors"]) == len(forms.split()) and max(found["errors"]) < 2e-2
    for used in found["registers"]:
        assert used == {"ymm": True, "zmm": "avx512" in features}
