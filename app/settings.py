"""What the user chose on the page, checked and kept on disk. Does not know what the choices do."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType

from app.files import copy_aside, left_aside, newer_schema, refused, set_aside, unknown_fields, write_json
from app.form_values import integral, number, one_of, switch, whole
from app.unicode_text import check_unicode, whole_unicode
from localmoe.core.config import (
    EXPERTS_ON,
    LANES,
    THINKING,
    DrafterName,
    DraftLength,
    EngineConfig,
    SamplingConfig,
    Thinking,
    parse_draft_length,
)
from localmoe.core.errors import ConfigError, LocalMoeError
from localmoe.core.units import parse_bytes, parse_speed
from localmoe.prefetch.registry import check_policy

SCHEMA = 2
MAX_CONTEXT = 10_000_000
MAX_NEW_TOKENS = 1_000_000
MAX_SYSTEM_PROMPT = 20_000
DRAFTERS: tuple[DrafterName, ...] = ("auto", "self", "mtp")  # that the page offers
SAMPLING_NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_USUAL_LENGTH_BEFORE = 1024  # tokens of an answer, before there was own_sampling
_NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What a load of the model needs; texts as the user typed them. "auto": the planner chooses."""

    model: str = "demo"
    vram_budget: str = "auto"
    context: str = "auto"
    emulated_link: str = ""  # empty: copies run at the machine's own speed
    better_draft: str = "on"  # or "off": built in the pauses between answers
    draft: str = ""  # the folder of a ready-made draft; empty: the model's own
    draft_bits: str = "4"  # of the model's own
    lanes: str = "auto"  # where experts outside VRAM come from
    cpu_threads: str = "auto"  # of the CPU lane
    drafter: str = "auto"  # or "self": the model in low bits, "mtp": its MTP layer, where it has one
    experts_on: str = "ram"  # or "disk": in a file there, of which RAM holds what it has room for
    ram_budget: str = "auto"  # of RAM for experts that lie on the disk

    def of_model(self, model: str) -> LoadSettings:
        """With another model's: that experts lie on the disk was chosen for this one."""
        return self if model == self.model else replace(self, model=model, experts_on="ram")

    def engine_config(self, answers: AnswerSettings) -> EngineConfig:
        """The engine's configuration.

        Raises:
            ConfigError: a text is no size, number or speed, or a folder's name no Unicode; or a folder's
                draft and the MTP layer are both to draft.
        """
        check_unicode("model", self.model)
        check_unicode("draft", self.draft)
        if not self.model.strip():
            raise ConfigError("No model is chosen: choose one from the list, or give a folder.")
        drafter = one_of(DRAFTERS, self.drafter, "Drafter '{}' is not known")
        if drafter == "mtp" and self.draft.strip():
            raise ConfigError("A ready-made draft and the MTP layer cannot both draft: choose one of them.")
        experts_on = one_of(EXPERTS_ON, self.experts_on, "Experts on '{}' are not known")
        ram_budget = parse_budget(self.ram_budget)
        link = self.emulated_link.strip()
        return EngineConfig(
            vram_budget_bytes=parse_budget(self.vram_budget),
            context=_parse_context(self.context),
            policy=answers.policy,
            draft_length=answers.draft_length,
            emulated_link_bytes_per_s=parse_speed(link) if link else None,
            improve_draft=switch("Better draft", self.better_draft),
            draft_dir=Path(self.draft) if self.draft.strip() else None,
            draft_bits=whole("Draft bits", self.draft_bits),
            lanes=one_of(LANES, self.lanes, "Lanes '{}' are not known"),
            experts_on=experts_on,
            ram_budget_bytes=ram_budget if experts_on == "disk" else None,
            drafter=drafter,
            cpu_threads=None if _is_auto(self.cpu_threads) else whole("CPU threads", self.cpu_threads),
        )


@dataclass(frozen=True, slots=True)
class AnswerSettings:
    """What holds from the next answer on."""

    draft_length: DraftLength = "auto"
    policy: str = "moe-speq"
    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.05
    max_new_tokens: int = 8192  # thoughts of reasoning models are long; the context bounds it anyhow
    seed: int | None = None
    system_prompt: str = ""
    strict: bool = False  # no sums on the CPU, so that bits depend on no setting
    show_drafted: bool = False  # colour what was accepted from the draft
    approximate: bool = False  # by the draft alone, which nothing verifies
    own_sampling: bool = True  # in place of the numbers, what the model's makers recommend
    thinking: Thinking = "auto"  # before an answer, as far as the model lets one choose

    def sampling(self, own: SamplingConfig | None = None) -> SamplingConfig:
        """How tokens are chosen; raises ConfigError when a number is out of range. own: what the makers of
        the loaded model recommend, if they do."""
        if self.own_sampling and own is not None:
            return replace(own, seed=self.seed)
        return SamplingConfig(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p,
            repetition_penalty=self.repetition_penalty, seed=self.seed,
        )  # fmt: skip


def parse_budget(text: str) -> int | None:
    """Bytes of a budget as typed; None for "auto" or nothing."""
    return None if _is_auto(text) else parse_bytes(text.strip())


def _is_auto(text: str) -> bool:
    return text.strip().lower() in ("", "auto")


def _thinking(text: str) -> Thinking:
    for thinking in THINKING:
        if thinking == text:
            return thinking
    raise ConfigError(f"Thinking '{text}' is not known: use one of {', '.join(THINKING)}.")


def _parse_context(text: str) -> int | None:
    text = text.strip().lower()
    if text in ("", "auto"):
        return None
    if not text.isdecimal() or not 16 <= int(text[:9]) <= MAX_CONTEXT:
        raise ConfigError(f"Context '{text}' is out of range: use auto, or 16 to {MAX_CONTEXT:,} tokens.")
    return int(text)


def check_answers(values: Mapping[str, object]) -> AnswerSettings:
    """The settings of these form values; a missing one keeps its default.

    Raises:
        ConfigError: one is out of range; the sentence says which, and what is allowed.
    """
    base = AnswerSettings()
    draft = values.get("draft_length", base.draft_length)
    seed = values.get("seed", base.seed)
    prompt = whole_unicode(str(values.get("system_prompt") or ""))
    if len(prompt) > MAX_SYSTEM_PROMPT:
        raise ConfigError(
            f"The system prompt has {len(prompt):,} characters: use at most {MAX_SYSTEM_PROMPT:,}."
        )
    settings = AnswerSettings(
        draft_length=parse_draft_length(integral(draft)),
        policy=check_policy(str(values.get("policy", base.policy))),
        temperature=number("Temperature", values, base.temperature),
        top_p=number("Top-p", values, base.top_p),
        top_k=whole("Top-k", values.get("top_k", base.top_k)),
        min_p=number("Min-p", values, base.min_p),
        repetition_penalty=number("Repetition penalty", values, base.repetition_penalty),
        max_new_tokens=whole("Max new tokens", values.get("max_new_tokens", base.max_new_tokens)),
        seed=None if seed in (None, "") else whole("Seed", seed),
        system_prompt=prompt,
        strict=bool(values.get("strict", base.strict)),
        show_drafted=bool(values.get("show_drafted", base.show_drafted)),
        approximate=bool(values.get("approximate", base.approximate)),
        own_sampling=bool(values.get("own_sampling", base.own_sampling)),
        thinking=_thinking(str(values.get("thinking", base.thinking))),
    )
    settings.sampling()
    if not 1 <= settings.max_new_tokens <= MAX_NEW_TOKENS:
        raise ConfigError(
            f"Max new tokens {settings.max_new_tokens} is out of range: use 1 to {MAX_NEW_TOKENS:,}."
        )
    return settings


def _sound_load(values: Mapping[str, object], answers: AnswerSettings) -> tuple[LoadSettings, list[str]]:
    """Every field that can be used, and the names of those that cannot."""
    load, bad = LoadSettings(), []
    for name in (field.name for field in fields(LoadSettings) if field.name in values):
        changed = replace(load, **{name: str(values[name])})
        try:
            changed.engine_config(answers)
            load = changed
        except LocalMoeError:
            bad.append(name)
    return load, bad


def _sound_answers(values: Mapping[str, object]) -> tuple[AnswerSettings, list[str]]:
    """The same for answers."""
    sound: dict[str, object] = {}
    bad = []
    for name in (field.name for field in fields(AnswerSettings) if field.name in values):
        try:
            check_answers({name: values[name]})
            sound[name] = values[name]
        except LocalMoeError:
            bad.append(name)
    return _of_before(check_answers(sound), values), bad


def _of_before(answers: AnswerSettings, values: Mapping[str, object]) -> AnswerSettings:
    """Where an earlier version kept these, which had no sampling but its numbers: whoever changed one goes on
    with them, and what nobody changed is as it is now."""
    if "own_sampling" in values:
        return answers
    usual = AnswerSettings()
    changed = any(getattr(answers, name) != getattr(usual, name) for name in SAMPLING_NUMBERS)
    unchanged_length = answers.max_new_tokens == _USUAL_LENGTH_BEFORE
    length = usual.max_new_tokens if unchanged_length else answers.max_new_tokens
    return replace(answers, own_sampling=not changed, max_new_tokens=length)


class SettingsStore:
    """Settings of this machine in one JSON file; `report` is a sentence if the file could not be read. Any
    thread may save."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._saving = threading.Lock()  # both kinds share a file, and are saved by different threads
        self.load = LoadSettings()
        self.answers = AnswerSettings()
        self.report = ""
        # of a newer version: what this one does not know, of the file and of both kinds
        self._schema, self._file, self._load, self._answers = SCHEMA, _NOTHING, _NOTHING, _NOTHING
        if path.exists():
            self._read()
        elif (kept := left_aside(path)) is not None:
            self._say_unread(kept)

    def _read(self) -> None:
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
            kept_load, kept_answers = dict(data["load"]), dict(data["answers"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self._say_unread(set_aside(self._path))
            return
        self._schema = newer_schema(data, SCHEMA)
        self._file = unknown_fields(data, ("schema", "load", "answers"))
        self._load = unknown_fields(kept_load, asdict(self.load))
        self._answers = unknown_fields(kept_answers, asdict(self.answers))
        if data.get("schema") == 1 and kept_load.get("drafter") == "self":
            del kept_load["drafter"]  # which left it to the engine then
        self.answers, bad = _sound_answers(kept_answers)
        self.load, bad_load = _sound_load(kept_load, self.answers)
        if bad or bad_load:
            self._mend([*bad_load, *bad])

    def _say_unread(self, kept: Path) -> None:
        self.report = f"The settings could not be read, so the usual ones are used; kept as {kept.name}."

    def _mend(self, bad: Sequence[str]) -> None:
        """Keep the file aside, and in its place the settings of it that can be used."""
        names, kept = ", ".join(bad), None
        try:
            kept = copy_aside(self._path)
            self.save()
        except (OSError, ConfigError) as error:  # the next start finds the file where it is
            if kept is not None:
                kept.unlink()
            what = "The settings could not be saved"
            why = refused(what, self._path.parent, error) if isinstance(error, OSError) else error
            self.report = f"Of the settings, the usual ones are used for {names}. {why}"
        else:
            self.report = f"Of the settings, the usual ones are used for {names}; the file is {kept.name}."

    def save(self, *, load: LoadSettings | None = None, answers: AnswerSettings | None = None) -> None:
        """Keep these (already checked) settings.

        Raises:
            ConfigError: the disk did not take them; those that were kept before stay.
        """
        with self._saving:
            load, answers = load or self.load, answers or self.answers
            try:
                kept = {
                    "load": {**asdict(load), **self._load},
                    "answers": {**asdict(answers), **self._answers},
                }
                write_json(self._path, {"schema": self._schema, **kept, **self._file})
            except OSError as error:
                what = "The settings could not be saved"
                raise ConfigError(refused(what, self._path.parent, error)) from error
            self.load, self.answers = load, answers
