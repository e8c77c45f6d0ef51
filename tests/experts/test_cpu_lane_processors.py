"""The CPU lane on a processor without AVX-512, as numba compiles for it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("lane_job.py")


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="names of x86 processors")
@pytest.mark.parametrize("features", ["+avx,+avx2,+fma", ""], ids=["avx2", "unknown"])
@pytest.mark.slow
def test_without_avx512_the_sums_are_right(features: str, tmp_path: Path) -> None:
    """unknown: as on processors whose vectors cannot look numbers up."""
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, str(JOB)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert max(found["errors"]) < 2e-2
    assert found["ymm"] and not found["zmm"]
