"""Layers that see a window keep a ring of positions: what rows see is what a cache that keeps all has, bit
for bit, and a text goes back to wherever it says that it can."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.test_more_architectures import ANSWERING
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiny_models import SLIDING_WINDOW, tiny_model
from torch import Tensor

pytest.importorskip("triton")

from localmoe.hardware import needs
from localmoe.hardware.needs import DEVICE_PREFILL_CHUNK, PASS_PADDING, cache_positions, ring_positions
from localmoe.kernels.gpu.attention import attention
from localmoe.model import device_rings
from localmoe.model.device_cache import DeviceKVCache
from localmoe.model.device_takeover import _attention
from localmoe.model.device_window import DeviceWindow
from localmoe.model.kv_trial import kv_layers
from localmoe.model.skeleton import skeleton_from_config

CPU = torch.device("cpu")
RING = 256  # positions of a small one
MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {},
    "gemma4_text": {"sliding_window": SLIDING_WINDOW},
}


def small_model(architecture: str) -> Any:
    changes = {**ANSWERING.get(architecture, {}), **MODELS[architecture]}
    return tiny_model(architecture, dtype=torch.float16, **changes)


@pytest.mark.slow(but=1)
@pytest.mark.interpreted
@pytest.mark.parametrize("window", [16, 100])
def test_bits_are_those_of_a_cache_that_keeps_all(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of many and of few rows, round a ring more than twice, and some that are longer than it has room
    for, even than it is; attention of the latter begins at any section."""
    ring = 768
    monkeypatch.setattr(needs, "ring_positions", lambda window: ring)
    monkeypatch.setattr(device_rings, "DEVICE_PREFILL_CHUNK", 90)
    at = DeviceWindow(8, CPU)
    caches = [DeviceKVCache(1, 2900, at, windows=windows) for windows in ({}, {0: window})]
    generator, start = torch.Generator().manual_seed(window), 0
    for rows in (90, 90, 3, 200, 1, 72, 17, 90, 300, 5, 90, 1, 120, 4, 91, 900, 2, 260, 1):
        at.at.fill_(start)
        at.visible = min(caches[0].capacity, 3072)
        query, key, value = torch.randn(3, 1, 2, rows, 16, generator=generator).half()
        results = []
        for cache in caches:
            cache.begin_prompt(start, rows)
            assert (at.unrolled is not None) == (rows > 90 and cache is caches[1])
            keys, values = cache.update(key[:, :1], value[:, :1], 0)
            module, mask = SimpleNamespace(localmoe_window=at), SimpleNamespace(window=window)
            out, _ = _attention(module, query, keys, values, mask, scaling=0.3)  # type: ignore[arg-type]
            results.append(out)
            cache.end_prompt()
        assert torch.equal(*results), f"{rows} rows at {start}"
        start += rows
    assert caches[0].num_bytes > 3 * caches[1].num_bytes and start > 3 * ring


def test_a_ring_too_small_for_what_rows_see_is_refused() -> None:
    at = torch.zeros(1, dtype=torch.int64)
    ring = torch.zeros(1, 1, RING, 16).half()
    for window, rows in ((None, 1), (200, 57)):
        with pytest.raises(AssertionError):
            attention(
                torch.zeros(1, 2, rows, 16).half(), ring, ring, at, scale=1.0, max_length=500, window=window
            )


CONTEXT = 6000


class Text:
    """What each position of a text holds, beside a cache with rings; every write has a value of its own."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.cache = DeviceKVCache(2, CONTEXT, DeviceWindow(8, CPU), windows={1: window})
        zeros = torch.zeros(1, 1, 1, 1)
        with torch.inference_mode():  # as passes do
            for layer in self.cache.layers:
                layer.lazy_initialization(zeros, zeros)
        assert self.cache.layers[1].capacity == ring_positions(window) < self.cache.capacity
        self.held = torch.empty(0)
        self.written = 0
        self.marked: int | None = None

    def _ring(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        ring = self.cache.layers[1].keys[0, 0, :, 0]
        return ring, torch.arange(first, end) % len(ring)

    @torch.inference_mode()
    def _write(self, count: int) -> Tensor:
        start = len(self.held)
        values = torch.arange(self.written, self.written + count).float()
        self.written += count
        ring, places = self._ring(start, start + count)
        ring[places] = values
        return values

    def _keep(self, values: Tensor) -> None:
        self.held = torch.cat((self.held, values))
        self.cache.advance(len(self.held))

    def prompt(self, count: int) -> None:
        """A prompt's pass, kept whole."""
        start = len(self.held)
        self.cache.begin_prompt(start, count)
        self._keep(self._write(count))
        self.marked = max(start + count - 32, start)

    def answer(self, steps: int, kept: int) -> None:
        """Windows, each padded as far as they may be, of which so many tokens are kept; the last one breaks
        off."""
        for step in range(steps):
            start = len(self.held)
            self.cache.expect_window(start, kept)
            values = self._write(PASS_PADDING)
            if step < steps - 1:
                self._keep(values[:kept])
            else:
                self.cache.truncate(start)

    def go_back(self, length: int) -> None:
        """To the longest prefix that can be kept."""
        kept = self.cache.keepable(length)
        assert 0 <= kept <= length
        self.cache.truncate(kept)
        self.held = self.held[:kept]
        if self.marked is not None and kept < self.marked:
            self.marked = None

    def leave(self, others: int) -> None:
        """For another text of so many tokens, and back again."""
        left, held, marked = self.cache.copy_out(), self.held, self.marked
        ways = [self.cache.keepable(length) for length in range(len(held) + 1)]
        self.go_back(0)
        self.prompt(others)
        self.answer(2, 5)
        self.cache.bring_back(left)
        self.held, self.marked = held, marked
        assert [self.cache.keepable(length) for length in range(len(held) + 1)] == ways
        assert [left.keepable(length) for length in range(len(held) + 1)] == ways
        assert left.num_bytes <= self.cache.copy_bytes and self.cache.length == len(held)

    def check(self) -> None:
        """A row at the end of the text sees what the text holds; what is promised is kept."""
        end = len(self.held)
        first = max(0, end - self.window + 1)
        ring, places = self._ring(first, end)
        assert torch.equal(ring[places], self.held[first:])
        assert self.cache.keepable(end) == end
        if self.marked is not None:
            assert self.cache.keepable(self.marked) == self.marked

    def check_ways_back(self) -> None:
        """To the first and the last of positions side by side that it says it can go back to."""
        kept = [self.cache.keepable(length) == length for length in range(len(self.held) + 1)]
        for length in range(1, len(kept)):
            if kept[length] and not (kept[length - 1] and kept[min(length + 1, len(kept) - 1)]):
                other = copy.deepcopy(self)
                other.go_back(length)
                assert len(other.held) == length
                other.check()


ACTIONS = st.one_of(
    st.tuples(st.just("prompt"), st.integers(1, DEVICE_PREFILL_CHUNK)),
    st.tuples(st.just("answer"), st.integers(1, 70), st.integers(1, 33)),
    st.tuples(st.just("go back"), st.floats(0, 1)),
    st.just(("to the mark",)),
    st.tuples(st.just("leave"), st.integers(1, DEVICE_PREFILL_CHUNK)),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([1, 16, 128, 300]), st.lists(ACTIONS, max_size=12))
def test_a_row_sees_its_window_whatever_was_written_and_dropped(
    window: int, actions: list[tuple[Any, ...]]
) -> None:
    text = Text(window)
    for action, *numbers in actions:
        left = CONTEXT - PASS_PADDING - len(text.held)
        match action:
            case "prompt" if numbers[0] <= left:
                text.prompt(numbers[0])
            case "answer":
                text.answer(min(numbers[0], left // numbers[1]), numbers[1])
            case "go back":
                text.go_back(int(numbers[0] * len(text.held)))
            case "to the mark" if text.marked is not None:
                text.go_back(text.marked)
                assert len(text.held) == text.marked
            case "leave":
                text.leave(numbers[0])
        text.check()
    text.check_ways_back()


def test_an_answer_can_be_given_again_and_again_whatever_its_length() -> None:
    text = Text(128)
    for count in (DEVICE_PREFILL_CHUNK, 500):
        text.prompt(count)
    text.check_ways_back()
    prompt = text.held.clone()
    for steps in (3, 300, 100, 250):
        text.answer(steps, 9)
        text.check()
        text.check_ways_back()
        text.go_back(len(prompt))
        text.check()
        assert torch.equal(text.held, prompt)
    text.go_back(1000)
    assert len(text.held) == 0, "nobody asked for this place"


@pytest.mark.parametrize("architecture", MODELS)
def test_windows_are_those_that_layers_ask_for(architecture: str) -> None:
    made = skeleton_from_config(small_model(architecture).config, torch.float16, "tiny")
    attention = made.model.config._attn_implementation
    kept = kv_layers(made.model, can_rollback=True)
    kinds = made.text_config.layer_types
    assert [layer.window for layer in kept] == [
        SLIDING_WINDOW if kind == "sliding_attention" else None for kind in kinds
    ]
    assert {*kinds} == {"sliding_attention", "full_attention"}
    assert made.model.config._attn_implementation == attention


def test_what_a_layer_keeps_is_planned() -> None:
    assert cache_positions(5000, None) == 5000
    assert cache_positions(500, 16) == 500
    assert cache_positions(5000, 16) == ring_positions(16) >= 16 + DEVICE_PREFILL_CHUNK + 2 * PASS_PADDING
