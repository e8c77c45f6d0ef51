"""The numbers that a pass reads on the device, and the cache that is written where they say."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from localmoe.model.device_cache import DeviceKVCache
from localmoe.model.device_clock import Clock, Landing
from localmoe.model.device_window import DeviceWindow
from localmoe.model.kv_trial import visible

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_a_window_shows_what_was_set_and_starts_at_its_first_token() -> None:
    window = DeviceWindow(5, DEVICE)
    window.set(70, 3, [4, 5, 6])
    window.cursor += 2
    assert (window.start.tolist(), window.live.tolist(), window.tokens[:3].tolist()) == ([70], [3], [4, 5, 6])
    window.set(80, 1, [9])
    assert (window.start.tolist(), window.live.tolist(), window.cursor.tolist()) == ([80], [1], [0])
    assert window.tokens[0].item() == 9 and window.tokens.shape == (5,) and window.rows == 5
    window.set(1, 5, [1, 2, 3, 4, 5])
    assert window.tokens.tolist() == [1, 2, 3, 4, 5]


def test_keys_and_values_are_written_where_the_window_says_and_nowhere_past_the_end() -> None:
    window = DeviceWindow(8, DEVICE)
    cache = DeviceKVCache(2, 100, window)
    capacity = cache.capacity
    assert capacity == 128  # whole blocks
    window.visible = 64
    generator = torch.Generator().manual_seed(0)
    written = torch.zeros(2, 2, 3, capacity, 16)
    for start, rows in ((0, 3), (3, 1), (2, 4), (capacity - 2, 5)):
        window.at.fill_(start)
        for layer in (0, 1):
            key, value = torch.randn(2, 1, 3, rows, 16, generator=generator).half()
            keys, values = cache.update(key.to(DEVICE), value.to(DEVICE), layer)
            fitting = min(rows, capacity - start)
            written[layer, 0, :, start : start + fitting] = key[0, :, :fitting]
            written[layer, 1, :, start : start + fitting] = value[0, :, :fitting]
            assert keys.shape == values.shape == (1, 3, 64, 16)
            assert torch.equal(keys[0].cpu(), written[layer, 0, :, :64].half())
            assert torch.equal(values[0].cpu(), written[layer, 1, :, :64].half())
    for layer in (0, 1):
        assert torch.equal(cache.layers[layer].keys[0].cpu(), written[layer, 0].half())


def test_all_layers_lie_in_one_allocation_but_for_one_that_needs_more() -> None:
    window = DeviceWindow(8, DEVICE)
    cache = DeviceKVCache(3, 100, window)
    window.visible = 64
    for layer, heads in enumerate((2, 2, 9)):
        states = torch.ones(1, heads, 4, 16, dtype=torch.float16, device=DEVICE)
        cache.update(states, states, layer)
    first, second, other = (layer.keys.untyped_storage() for layer in cache.layers)
    assert first.data_ptr() == second.data_ptr() != other.data_ptr()
    assert first.nbytes() == 3 * 2 * 2 * cache.capacity * 16 * 2
    assert cache.layers[2].values.shape == (1, 9, cache.capacity, 16)
    cache.release()
    assert cache.num_bytes == 0


def test_what_passes_have_written_can_be_wiped_outside_of_them() -> None:
    """By whoever hears that an answer's numbers are none."""
    window = DeviceWindow(8, DEVICE)
    cache = DeviceKVCache(2, 100, window)
    window.visible = 64
    with torch.inference_mode():  # as passes run
        states = torch.full((1, 2, 4, 16), float("nan"), dtype=torch.float16, device=DEVICE)
        for layer in (0, 1):
            cache.update(states, states, layer)
    cache.truncate(0)
    cache.wipe()
    assert cache.length == 0
    assert not any(bool(part.any()) for layer in cache.layers for part in (layer.keys, layer.values))


def test_layers_that_need_less_leave_no_room_unused() -> None:
    window = DeviceWindow(8, DEVICE)
    needed = (6 + 2 + 2) * 2 * DeviceKVCache(1, 100, window).capacity * 16 * 2
    cache = DeviceKVCache(3, 100, window, kv_bytes=needed)
    window.visible = 64
    for layer, heads in enumerate((6, 2, 2)):
        states = torch.ones(1, heads, 4, 16, dtype=torch.float16, device=DEVICE)
        cache.update(states, states, layer)
    storages = [layer.keys.untyped_storage() for layer in cache.layers]
    assert len({storage.data_ptr() for storage in storages}) == 1
    assert storages[0].nbytes() == needed == cache.num_bytes


def test_the_host_keeps_the_length_and_rolls_it_back() -> None:
    cache = DeviceKVCache(3, 100, DeviceWindow(4, DEVICE))
    assert cache.length == 0
    cache.advance(90)
    assert cache.length == 90 and {layer.length for layer in cache.layers} == {90}
    cache.truncate(12)
    assert cache.length == 12
    with pytest.raises(AssertionError):
        cache.advance(cache.capacity + 1)


@pytest.mark.parametrize(("options", "window"), [({}, None), ({"local_size": 16}, 16)])
def test_no_mask_is_built_but_a_sliding_window_is_remembered(
    options: dict[str, int], window: int | None
) -> None:
    assert visible(1, 2, cache_position=None, **options).window == window


def test_numbers_on_their_way_are_not_changed_by_what_comes_after() -> None:
    numbers = torch.arange(6, dtype=torch.int32, device=DEVICE)
    landing = Landing(numbers)
    numbers.fill_(-1)
    assert landing.wait().tolist() == list(range(6))


def test_a_clock_tells_the_seconds_between_its_points(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5, 13.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = Clock(on_gpu=False)
    clock.tick()
    clock.tick()
    assert clock.seconds() == [0.5, 2.5]
