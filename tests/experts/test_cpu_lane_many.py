"""The CPU lane where the processor has a matrix unit: on others by plain code in the unit's place."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from support.kept_builds import kept_builds

from localmoe.kernels.cpu import processor
from localmoe.kernels.cpu.processor import HAS_BF16_DOTS, may_use_tiles

JOB = Path(__file__).with_name("many_job.py")


@pytest.mark.skipif(not HAS_BF16_DOTS, reason="this processor does not decode weights to bfloat16 pairs")
@pytest.mark.parametrize("unit", ["native", pytest.param("emulated", marks=pytest.mark.slow)])
def test_experts_of_many_tokens_equal_float64(unit: str, pytestconfig: pytest.Config) -> None:
    if unit == "native" and not may_use_tiles():
        pytest.skip("this processor has no matrix unit, or the system does not lend it")
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(kept_builds(pytestconfig, f"many-{unit}"))}
    done = subprocess.run(
        [sys.executable, str(JOB), unit], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert max(found["errors"]) < 2e-2 and found["changed"] == 0 and found["used"] >= 3


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="asks Linux on x86-64")
def test_the_unit_is_used_only_where_the_system_lends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "HAS_TILES", True)  # the compiler knows it
    if "amx_tile" not in Path("/proc/cpuinfo").read_text():
        assert not processor.may_use_tiles()
    monkeypatch.setattr(processor, "HAS_TILES", False)
    assert not processor.may_use_tiles()
