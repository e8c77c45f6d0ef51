"""What the driver is asked, and what becomes of its refusals, with a driver that says what it is told to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from localmoe.kernels import cuda_driver
from localmoe.kernels.cuda_driver import DriverCallError, copy_to_device, device_address, driver_version


class Driver:
    """Finds host memory a terabyte further on; refuses address 0."""

    @staticmethod
    def cuDriverGetVersion(version: Any) -> int:
        version._obj.value = 12_080
        return 0

    @staticmethod
    def cuMemHostGetDevicePointer_v2(found: Any, address: Any, flags: Any) -> int:
        assert flags.value == 0
        if address.value is None:
            return 1
        found._obj.value = address.value + (1 << 40)
        return 0


def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "_driver", lambda: Driver)
    assert driver_version() == 12_080
    assert device_address(0x7F00_1234_5000) == 0x7F00_1234_5000 + (1 << 40)
    with pytest.raises(DriverCallError, match="cuMemHostGetDevicePointer failed with error 1") as caught:
        device_address(0)
    assert caught.value.code == 1


def test_copies_are_handed_over_with_their_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def cuMemcpyHtoDAsync_v2(*numbers: int) -> int:
        asked.append(numbers)
        return 0 if numbers[2] else 1

    monkeypatch.setattr(
        cuda_driver, "_driver", lambda: SimpleNamespace(cuMemcpyHtoDAsync_v2=cuMemcpyHtoDAsync_v2)
    )
    cuda_driver._copy_to_device.cache_clear()
    try:
        copy_to_device(1 << 40, 1 << 33, 4096, 5)
        with pytest.raises(DriverCallError, match="cuMemcpyHtoDAsync failed with error 1"):
            copy_to_device(1 << 40, 1 << 33, 0, 5)
    finally:
        cuda_driver._copy_to_device.cache_clear()
    assert asked[0] == (1 << 40, 1 << 33, 4096, 5)
