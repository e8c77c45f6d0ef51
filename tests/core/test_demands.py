"""What the target asked for: heat against its definition, passes in order, bounds, other threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localmoe.core.demands import HALF_LIFE, DemandRecorder
from localmoe.core.events import (
    DraftFinished,
    LayerDemanded,
    LayerFinished,
    PassRouted,
    PrefillStarted,
    StepFinished,
    StepStarted,
)

L, E = 3, 5
passes = st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 2 ** (L * E) - 1)), max_size=12)


def as_mask(bits: int) -> np.ndarray:
    return np.array([bits >> i & 1 for i in range(L * E)], bool).reshape(L, E)


def tell(recorder: DemandRecorder, is_step: bool, whole: bool, mask: np.ndarray) -> None:
    """One pass, as a GPU's whole passes or layer by layer."""
    recorder.note(StepStarted(0, 2) if is_step else PrefillStarted(7))
    recorder.note(DraftFinished(2))
    if whole:
        recorder.note(PassRouted(mask))
    else:
        for layer in range(L):
            recorder.note(LayerDemanded(layer, tuple(np.flatnonzero(mask[layer]).tolist()), 3))
            recorder.note(LayerFinished(layer))
    if is_step:
        recorder.note(StepFinished(2, 1))


@settings(max_examples=50)
@given(passes)
def test_heat_is_the_decayed_share_of_passes_and_passes_come_back_in_order(
    story: list[tuple[bool, bool, int]],
) -> None:
    recorder = DemandRecorder(L, E)
    recorder.begin_answer(as_mask(5))
    masks = [as_mask(bits) for _, _, bits in story]
    for (is_step, whole, _), mask in zip(story, masks, strict=True):
        tell(recorder, is_step, whole, mask)
    recorder.note(StepStarted(0, 0))  # ends a prompt's last pass
    weights = [0.5 ** (age / HALF_LIFE) for age in reversed(range(len(masks)))]
    expected = sum((w * m for w, m in zip(weights, masks, strict=True)), np.zeros((L, E)))
    np.testing.assert_allclose(recorder.heat(), expected / max(sum(weights), 1e-9), rtol=1e-5, atol=1e-6)
    found = recorder.answer()
    np.testing.assert_array_equal(found.resident, as_mask(5))
    assert found.counted == tuple(is_step for is_step, _, _ in story) and found.complete
    assert len(found.passes) == len(masks)
    for got, mask in zip(found.passes, masks, strict=True):
        np.testing.assert_array_equal(got, mask)
    assert found.num_counted == sum(
        int(m.sum()) for (step, _, _), m in zip(story, masks, strict=True) if step
    )


@pytest.mark.parametrize(("max_passes", "max_demands", "kept"), [(2, 100, 2), (100, 5, 2), (100, 6, 3)])
def test_a_long_answer_keeps_its_first_passes_and_says_so(
    max_passes: int, max_demands: int, kept: int
) -> None:
    recorder = DemandRecorder(L, E, max_passes=max_passes, max_demands=max_demands)
    for _ in range(5):
        tell(recorder, True, True, as_mask(3))
    found = recorder.answer()
    assert len(found.passes) == kept and not found.complete
    recorder.begin_answer(as_mask(0))
    assert recorder.answer().complete and not recorder.answer().passes
    assert recorder.heat().max() == pytest.approx(1.0)  # stays over the end of an answer


def test_readers_in_other_threads_never_see_half_a_pass() -> None:
    """All experts of a pass are asked for alike, so every table that is read has one value."""
    recorder, ended, torn = DemandRecorder(48, 128), threading.Event(), []

    def read() -> None:
        while not ended.is_set():
            heat = recorder.heat()
            if heat.min() != heat.max():
                torn.append(heat)

    reader = threading.Thread(target=read)
    reader.start()
    everything, experts = np.ones((48, 128), np.bool_), tuple(range(128))
    for step in range(300):
        recorder.note(StepStarted(step, 0))
        if step % 10:
            recorder.note(PassRouted(everything))
        else:
            for layer in range(48):
                recorder.note(LayerDemanded(layer, experts, 1))
        recorder.note(StepFinished(0, 0))
    ended.set()
    reader.join()
    assert not torn
