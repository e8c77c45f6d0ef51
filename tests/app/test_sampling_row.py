"""The switch between the model's own sampling and the numbers, as edits of the form mean it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.settings import SAMPLING_NUMBERS, AnswerSettings
from app.tabs.sampling_row import held_of, settle

KEPT = AnswerSettings()
OFF = replace(KEPT, own_sampling=False)


@pytest.mark.parametrize(
    ("before", "edit", "own"),
    [
        (KEPT, {}, True), (KEPT, {"seed": 7, "max_new_tokens": 5, "system_prompt": "x"}, True),
        (KEPT, {"temperature": 0.7}, False), (KEPT, {"top_k": 40.0}, False), (KEPT, {"min_p": None}, False),
        (KEPT, {"temperature": 99, "seed": 7}, False), (KEPT, {"temperature": 0.60, "top_k": 0.0}, True),
        (KEPT, {"own_sampling": False}, False), (OFF, {}, False), (OFF, {"top_p": 0.5}, False),
        (OFF, {"own_sampling": True}, True), (OFF, {"own_sampling": True, "top_p": 0.5}, True),
    ],
)  # fmt: skip
def test_changing_a_number_ends_own_sampling_and_nothing_else_does(
    before: AnswerSettings, edit: dict[str, Any], own: bool
) -> None:
    shown = {**asdict(before), **edit}
    assert settle(shown, held_of(before)) == {**shown, "own_sampling": own}


def test_what_another_window_has_kept_meanwhile_is_no_change_of_this_form() -> None:
    """The form is held against what it showed, whatever is kept by now."""
    shown = {**asdict(KEPT), "seed": 7}
    assert settle(shown, held_of(KEPT))["own_sampling"]


EDITS = st.fixed_dictionaries(
    {},
    optional={
        "own_sampling": st.booleans(),
        "seed": st.integers(0, 3),
        **dict.fromkeys(SAMPLING_NUMBERS, st.sampled_from((None, 0, 0.5, 1.0, 99))),
    },
)


@given(edits=st.lists(EDITS, max_size=8))
def test_after_any_edits_it_is_on_only_if_no_number_changed_since_it_was_switched_on(
    edits: list[dict[str, Any]],
) -> None:
    shown, on_since = asdict(KEPT), held_of(KEPT)[1:]
    for edit in edits:
        before = shown
        shown = settle({**before, **edit}, held_of(before))
        if not before["own_sampling"]:
            on_since = held_of(shown)[1:]
        assert not shown["own_sampling"] or held_of(shown)[1:] == on_since
        numbers = {name: {**before, **edit}[name] for name in SAMPLING_NUMBERS}
        assert {name: shown[name] for name in SAMPLING_NUMBERS} == numbers, "what was typed stays"
