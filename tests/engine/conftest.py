"""What all tests of engines run under."""

from __future__ import annotations

import importlib.util

import pytest
import torch


@pytest.fixture(autouse=True)
def few_rows_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the usual where kernels are interpreted: trials of routers took half of the time of some
    tests. As a multiple of 16 too they launch the same. What trials decide is tested with modules."""
    if importlib.util.find_spec("triton") and not torch.cuda.is_available():
        from localmoe.model import device_routers

        monkeypatch.setattr(device_routers, "ROUTED_ROWS", device_routers.ROUTED_ROWS // 4)
