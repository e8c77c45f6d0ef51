"""What is kept of a form of the answers' settings that another window may have left behind."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.service import ChatService
from app.settings import AnswerSettings, SettingsStore
from app.tabs.answer_edits import Shown, as_shown, changed_elsewhere, edited, keep, keep_sound
from app.tabs.sampling_row import settle
from localmoe.core.errors import LocalMoeError

USUAL = AnswerSettings()


def test_only_what_the_user_of_a_form_has_changed_is_kept(service: ChatService) -> None:
    shown = Shown.of(service.answers)
    service.set_answers({"temperature": 1.25, "own_sampling": False, "thinking": "low"})  # another window
    shown, _ = keep(service, {**as_shown(shown.kept), "seed": "7", "top_k": 0.0}, shown)
    assert service.answers == replace(USUAL, temperature=1.25, own_sampling=False, thinking="low", seed=7)
    assert shown.kept == replace(USUAL, seed=7), "it still shows the other numbers"
    shown, _ = keep(service, {**as_shown(shown.kept), "seed": ""}, shown)
    assert (service.answers.seed, service.answers.temperature) == (None, 1.25)


def test_a_refused_edit_stays_one_until_it_is_mended(service: ChatService) -> None:
    shown, said = Shown.of(service.answers), {**as_shown(service.answers), "max_new_tokens": 0}
    for other in ({}, {"seed": "7"}):
        with pytest.raises(LocalMoeError, match="Max new tokens 0"):
            keep(service, {**said, **other}, shown)
    assert service.answers == USUAL
    keep(service, {**said, "max_new_tokens": 5, "seed": "7"}, shown)
    assert service.answers == replace(USUAL, max_new_tokens=5, seed=7)


def test_an_edit_that_is_refused_keeps_no_other_one_back(service: ChatService) -> None:
    shown = Shown.of(service.answers)
    said = settle({**as_shown(shown.kept), "temperature": 99.0}, shown.held)
    shown, _, refusal = keep_sound(service, said, shown)
    assert "Temperature" in refusal and service.answers == USUAL, "the makers' numbers are still used"
    shown, _, refusal = keep_sound(service, {**said, "seed": "7", "max_new_tokens": 0}, shown)
    assert "Temperature" in refusal and service.answers == replace(USUAL, seed=7)
    shown, _, refusal = keep_sound(service, {**said, "seed": "7", "top_k": 5}, shown)
    assert "Temperature" in refusal
    assert service.answers == replace(USUAL, seed=7, top_k=5, own_sampling=False)
    shown, sentence, refusal = keep_sound(service, {**said, "seed": "7", "top_k": 5, "temperature": 1}, shown)
    assert not refusal and sentence
    assert service.answers == replace(USUAL, seed=7, top_k=5, own_sampling=False, temperature=1.0)


def test_a_preset_is_kept_beside_an_edit_that_is_refused(service: ChatService) -> None:
    shown = Shown.of(service.answers)
    said = {**as_shown(shown.kept), "max_new_tokens": 0, "system_prompt": "Be brief."}
    shown, sentence, refusal = keep_sound(service, said, shown, also=("system_prompt",))
    assert sentence and "Max new tokens 0" in refusal
    assert service.answers == replace(USUAL, system_prompt="Be brief.")
    shown, sentence, refusal = keep_sound(service, {**said, "seed": "x"}, shown, also=("seed",))
    assert not sentence and refusal and service.answers == replace(USUAL, system_prompt="Be brief.")


def test_a_number_is_used_though_another_window_switched_the_models_own_on() -> None:
    off = replace(USUAL, own_sampling=False)
    said = {**as_shown(off), "temperature": 0.7}
    assert edited(settle(said, Shown.of(off).held), off) == {"temperature": 0.7, "own_sampling": False}


EDITS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from((0.0, 0.5, 1.0)), "seed": st.sampled_from((None, 1, 2)),
        "thinking": st.sampled_from(("auto", "off", "low")), "draft_length": st.sampled_from(("auto", 0, 4)),
        "system_prompt": st.sampled_from(("", "a", "b")),
    },
)  # fmt: skip


@given(kept=EDITS, now=EDITS, mine=EDITS)
def test_a_form_follows_all_but_what_its_user_is_changing(
    kept: dict[str, Any], now: dict[str, Any], mine: dict[str, Any]
) -> None:
    before, after = replace(USUAL, **kept), replace(USUAL, **now)
    said = as_shown(replace(before, **mine))
    names = changed_elsewhere(said, before, after)
    followed = {**said, **{name: as_shown(after)[name] for name in names}}
    own = edited(said, before)
    for name, value in followed.items():
        assert value == (said if name in own else as_shown(after))[name]


@given(now=EDITS, typed=st.sampled_from((0.25, 0.75)))
def test_a_number_that_is_being_typed_ends_own_sampling_though_the_form_followed_meanwhile(
    now: dict[str, Any], typed: float
) -> None:
    before, after = replace(USUAL, own_sampling=True), replace(USUAL, own_sampling=True, **now)
    said = {**as_shown(before), "temperature": typed}  # its listener has yet to hear of it
    names = changed_elsewhere(said, before, after)
    shown = Shown.of(before).follow(after, names)
    said = {**said, **{name: as_shown(after)[name] for name in names}}
    wanted = settle(said, shown.held)
    assert not wanted["own_sampling"]
    assert edited(wanted, shown.kept)["temperature"] == typed


def test_two_windows_that_change_settings_at_once_undo_nothing_of_each_other(
    service: ChatService, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, save = threading.Barrier(2), SettingsStore.save

    def slow(store: SettingsStore, **settings: Any) -> None:
        with suppress(threading.BrokenBarrierError):  # the other one waits until this one has written
            both.wait(0.3)
        save(store, **settings)

    monkeypatch.setattr(SettingsStore, "save", slow)
    changes: tuple[dict[str, object], ...] = ({"seed": 7}, {"thinking": "low"})
    threads = [threading.Thread(target=service.set_answers, args=(change,)) for change in changes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert service.answers == service.store.answers == replace(USUAL, seed=7, thinking="low")
