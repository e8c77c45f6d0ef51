"""Which of the answers' settings the user of one page has changed: only those are kept from its form, as
another window may have changed the others meanwhile. Knows no widget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from app.service import ChatService
from app.settings import SAMPLING_NUMBERS, AnswerSettings, check_answers
from app.tabs.sampling_row import HELD_NAMES, Held, held_of
from localmoe.core.errors import LocalMoeError


@dataclass(frozen=True, slots=True)
class Shown:
    """What a page knows of its form. kept: the settings as it was told of them; the form differs from them
    by what its user has changed. held: its switch and numbers after the last edit."""

    kept: AnswerSettings
    held: Held

    @classmethod
    def of(cls, answers: AnswerSettings) -> Shown:
        """A form that was filled in from these."""
        return cls(answers, held_of(answers))

    def follow(self, now: AnswerSettings, names: Sequence[str]) -> Shown:
        """After these settings were filled in as they are `now`. An edit that its listener has yet to hear of
        stays one: the rest of `held` is as it was."""
        held = dict(zip(HELD_NAMES, self.held, strict=True))
        held.update((name, getattr(now, name)) for name in names)
        return Shown(now, held_of(held))


def as_shown(answers: AnswerSettings) -> dict[str, Any]:
    """The settings as a form says them, by their names."""
    return {**asdict(answers), "seed": "" if answers.seed is None else str(answers.seed)}


def edited(said: Mapping[str, Any], kept: AnswerSettings) -> dict[str, Any]:
    """What a form says otherwise than the settings `kept`. Its numbers come with the switch that says whether
    they are used."""
    before = as_shown(kept)
    changed = {name: value for name, value in said.items() if value != before[name]}
    if not changed.keys().isdisjoint(SAMPLING_NUMBERS):
        changed["own_sampling"] = said["own_sampling"]
    return changed


def keep(
    service: ChatService, said: Mapping[str, Any], shown: Shown, also: Sequence[str] = ()
) -> tuple[Shown, str]:
    """Keep what the form says otherwise than its page was told; what the page knows then, and a sentence.

    Args:
        also: settings to keep whatever the page was told of them.

    Raises:
        LocalMoeError: one of them is out of range, or the disk refuses; nothing is kept.
    """
    changed = {**edited(said, shown.kept), **{name: said[name] for name in also}}
    kept = check_answers({**asdict(shown.kept), **changed})
    sentence = service.set_answers(changed)
    return replace(shown, kept=kept), sentence


def keep_sound(
    service: ChatService, said: Mapping[str, Any], shown: Shown, also: Sequence[str] = ()
) -> tuple[Shown, str, str]:
    """The same, where one that is out of range keeps none of the others back: what the page knows then, a
    sentence of what was kept, and one of the first that was not; "" where there is none.

    Raises:
        LocalMoeError: the disk refuses; nothing is kept.
    """
    sound, refusal = _sound({**edited(said, shown.kept), **{name: said[name] for name in also}})
    if not sound and refusal:
        return shown, "", refusal
    known, sentence = keep(service, {**as_shown(shown.kept), **sound}, shown, [n for n in also if n in sound])
    return known, sentence, refusal


def _sound(changed: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Those that can be used, and what is said of the first that cannot. The switch of the numbers stays as
    it is where none of those that were changed can be used."""
    sound, refusals = {}, {}
    for name, value in changed.items():
        try:
            check_answers({name: value})
            sound[name] = value
        except LocalMoeError as error:
            refusals[name] = str(error)
    numbers = set(SAMPLING_NUMBERS)
    if numbers & refusals.keys() and not numbers & sound.keys():
        sound.pop("own_sampling", None)
    return sound, next(iter(refusals.values()), "")


def changed_elsewhere(said: Mapping[str, Any], kept: AnswerSettings, now: AnswerSettings) -> list[str]:
    """The settings that are other ones `now`, and that the form's user is not changing just now."""
    before, after = as_shown(kept), as_shown(now)
    return [name for name in said if before[name] != after[name] and said[name] == before[name]]
