"""Frozen settings of an engine and of one request, checked where they are made. Reads no environment,
probes nothing."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from localmoe.core.errors import ConfigError
from localmoe.core.switches import DEFAULT_SWITCHES, Switches
from localmoe.core.tools import Tool
from localmoe.core.types import Message

MAX_DRAFT_LENGTH = 64
MAX_CPU_THREADS = 512
USUAL_CONTEXT = 4096  # tokens where none are named, if the model was made for as many
LEAST_CONTEXT = 16  # tokens
LONGEST_UNASKED = 32_768  # and where that takes little of the memory
LEAST_LINK = 1.0  # bytes/s; with less a copy would end later than clocks can say
LEAST_TEMPERATURE = 1e-3  # logits divided by less overflow
Thinking = Literal["auto", "off", "on", "low", "medium", "high"]
THINKING: tuple[Thinking, ...] = get_args(Thinking)
DraftLength = int | Literal["auto"]
Lanes = Literal["auto", "all", "vram+link", "vram+cpu"]
DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16"]
ALLOWED_DRAFT_BITS = (2, 3, 4, 8)
LANES: tuple[Lanes, ...] = get_args(Lanes)
DrafterName = Literal["auto", "self", "prompt-lookup", "mtp", "model"]
ExpertsOn = Literal["ram", "disk"]
EXPERTS_ON: tuple[ExpertsOn, ...] = get_args(ExpertsOn)


def check_draft_length(value: DraftLength) -> DraftLength:
    """The value itself, if it is "auto" or 0..64.

    Raises:
        ConfigError: otherwise.
    """
    if value == "auto" or (
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_DRAFT_LENGTH
    ):
        return value
    raise ConfigError(f"Draft length {value} is out of range: use auto, 0 (off) or 1 to {MAX_DRAFT_LENGTH}.")


def parse_draft_length(text: str) -> DraftLength:
    """ "auto" or a number, as typed by a user.

    Raises:
        ConfigError: neither, or out of range.
    """
    text = text.strip().lower()
    if text == "auto":
        return "auto"
    try:
        return check_draft_length(int(text))
    except ValueError:
        raise ConfigError(f"Draft length '{text}' is not a number: use auto, 0 (off) or 1 to 64.") from None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a model is loaded.

    Attributes:
        vram_budget_bytes: device memory that the engine may use; None lets the planner take what is free.
        context: tokens of prompt plus answer that the KV cache holds; None: hardware.context chooses.
        policy: name of the prefetch policy.
        draft_length: "auto", 0 (off) or a fixed number of drafted tokens a step.
        lanes: where experts that are not in device memory come from: over the link, computed on the CPU, both
            ("all"), or what was measured to pay ("auto").
        strict: the bits of an answer never depend on draft length, policy, budget or timing, at the price of
            the CPU lane, whose sums run in another order.
        cpu_threads: of the CPU lane; None: one for each core but one or two. Without a GPU, those that
            compute experts in place; None: as many as PyTorch has.
        drafter: who proposes tokens: the model's own low-bit draft ("self"), a look into the text so far, the
            layer that it was trained with to predict one token more (MTP), or another, smaller model. "auto":
            that layer where it has one and a GPU's steps run whole, else the first.
        draft_model: that other model; it shares the tokenizer.
        draft_dir: a draft to use instead of the default place.
        draft_bits: of the draft in the default place, which is built by rounding where there is none.
        pack_experts: keep experts of bfloat16, and on a GPU the output head, in twelve bits a weight, without
            loss, and experts published in FP8, NVFP4 or INT4 as they are, where kernels read that.
        emulated_link_bytes_per_s: limit host-to-device copies to this rate (CPU only, always labelled
            emulated).
        experts_on: where all experts lie: in RAM, or in a file on the disk, of which RAM holds as many as
            there is room for.
        ram_budget_bytes: of RAM for those; None: what is free, less a reserve.
        prompt_cache_bytes: host RAM for what other texts had left in the KV cache, so that going back to one
            prefills only what is new; None: hardware.host_room chooses; 0: none.
        improve_draft: whoever holds the engine builds a better draft in the pauses between answers (see
            Engine.improve_draft); the engine itself starts nothing.
    """

    vram_budget_bytes: int | None = None
    context: int | None = None
    policy: str = "moe-speq"
    draft_length: DraftLength = "auto"
    lanes: Lanes = "auto"
    strict: bool = False
    cpu_threads: int | None = None
    drafter: DrafterName = "auto"
    draft_model: str | None = None
    draft_dir: Path | None = None
    draft_bits: int = 4
    device: DeviceName = "auto"
    dtype: DtypeName = "auto"
    pack_experts: bool = True
    emulated_link_bytes_per_s: float | None = None
    experts_on: ExpertsOn = "ram"
    ram_budget_bytes: int | None = None
    prompt_cache_bytes: int | None = None
    improve_draft: bool = False

    def __post_init__(self) -> None:
        check_draft_length(self.draft_length)
        for name in (
            "vram_budget_bytes", "context", "cpu_threads", "draft_bits", "ram_budget_bytes",
            "prompt_cache_bytes",
        ):  # fmt: skip
            _check_whole(name.replace("_", " ").capitalize(), getattr(self, name))
        for name, known_names in (("device", DeviceName), ("dtype", DtypeName)):
            if getattr(self, name) not in get_args(known_names):
                choices = ", ".join(get_args(known_names))
                raise ConfigError(f"There is no {name} '{getattr(self, name)}': choose one of {choices}.")
        if self.draft_dir is not None and not isinstance(self.draft_dir, Path):
            raise ConfigError(f"The draft folder {self.draft_dir!r} is no path: give a pathlib.Path.")
        if self.drafter not in get_args(DrafterName):
            names = ", ".join(get_args(DrafterName))
            raise ConfigError(f"There is no drafter '{self.drafter}': choose one of {names}.")
        if (self.drafter == "model") != (self.draft_model is not None):
            raise ConfigError("A draft model and the drafter 'model' go together: give both, or neither.")
        if self.drafter not in ("auto", "self") and self.draft_dir is not None:
            raise ConfigError(f"Drafter {self.drafter} reads no draft: leave the draft folder out.")
        if self.draft_bits not in ALLOWED_DRAFT_BITS:
            known = ", ".join(map(str, ALLOWED_DRAFT_BITS))
            raise ConfigError(f"A draft of {self.draft_bits} bits is not known: use {known}.")
        for what, size in (("VRAM", self.vram_budget_bytes), ("RAM", self.ram_budget_bytes)):
            if size is not None and size <= 0:
                raise ConfigError(f"{what} budget {size} bytes is out of range: give a positive size.")
        if self.experts_on not in EXPERTS_ON:
            raise ConfigError(f"Experts on '{self.experts_on}' are not known: use ram or disk.")
        if self.ram_budget_bytes is not None and self.experts_on != "disk":
            raise ConfigError("A RAM budget is one of experts on the disk: ask for both, or leave it out.")
        if self.prompt_cache_bytes is not None and self.prompt_cache_bytes < 0:
            raise ConfigError(
                f"Prompt cache {self.prompt_cache_bytes} bytes is out of range: give a size, or 0 for none."
            )
        if self.context is not None and self.context < LEAST_CONTEXT:
            raise ConfigError(f"Context {self.context} is too small: give at least {LEAST_CONTEXT} tokens.")
        if self.lanes not in LANES:
            raise ConfigError(f"Lanes '{self.lanes}' are not known: use one of {', '.join(LANES)}.")
        if self.strict and self.lanes in ("all", "vram+cpu"):
            raise ConfigError(
                f"--strict and --lanes {self.lanes} exclude each other, as CPU sums run in another "
                "order: leave one of them out."
            )
        if self.cpu_threads is not None and not 1 <= self.cpu_threads <= MAX_CPU_THREADS:
            raise ConfigError(f"{self.cpu_threads} CPU threads are out of range: use 1 to {MAX_CPU_THREADS}.")
        link = self.emulated_link_bytes_per_s
        if link is not None and not (_is_number(link) and LEAST_LINK <= link < math.inf):
            raise ConfigError(
                f"Emulated link speed {link} is out of range: give a rate such as 2GB/s, of at least 1B/s."
            )


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How a token is chosen from the target's logits. temperature 0 is greedy; seed None draws a fresh
    one."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check("Temperature", self.temperature, 0.0, 10.0)
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ConfigError(f"Temperature {self.temperature} is out of range: use 0, or at least 0.001.")
        _check("Top-p", self.top_p, 0.0, 1.0, low_open=True)
        _check_whole("Top-k", self.top_k)
        _check("Top-k", self.top_k, 0, 1_000_000)
        _check("Min-p", self.min_p, 0.0, 1.0)
        _check("Repetition penalty", self.repetition_penalty, 0.1, 10.0)
        if self.seed is not None:
            _check_whole("Seed", self.seed)
            _check("Seed", self.seed, 0, 2**63 - 1)

    @property
    def greedy(self) -> bool:
        """Whether every token is the argmax."""
        return self.temperature == 0.0


def _check_whole(name: str, value: object) -> None:
    """None too, where that stands for something."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ConfigError(f"{name} {value!r} is no whole number: give one.")


def _is_number(value: object) -> bool:
    """Whether it is one that is not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    if not _is_number(value):
        raise ConfigError(f"{name} {value!r} is no number: give one.")
    # comparing before converting: an int may be too large for a float; NaN fails every comparison
    if not low <= value <= high or (low_open and value == low):
        above = "above" if low_open else "at least"
        most = high if isinstance(high, int) else f"{high:g}"  # of a seed all digits: rounded it is no number
        raise ConfigError(f"{name} {value} is out of range: use a value {above} {low:g} and at most {most}.")


def check_schema(schema: str) -> None:
    """See that a text is the JSON of an object.

    Raises:
        ConfigError: it is none.
    """
    try:
        found = json.loads(schema)
    except RecursionError:
        raise ConfigError("The schema of the answer is nested too deep: make it flatter.") from None
    except ValueError as error:
        reason = str(error).split("; use ")[0]  # what Python could be told
        raise ConfigError(f"The schema of the answer is no JSON ({reason}): mend it.") from None
    if not isinstance(found, dict):
        raise ConfigError("The schema of the answer has to be a JSON object.")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One answer: to chat messages, a raw prompt text, or token ids as they are. Draft length and policy may
    differ from the engine's. strict: this one without the CPU lane (see EngineConfig). draft_only:
    approximate, all but the prompt by the draft, which nothing verifies. switches: optimisations to do
    without, for measurements. continue_answer: the last message is an unfinished answer of the assistant,
    and what is generated goes on from its last character. tools: what the model is told that it may
    call; the events' text holds its calls in its own notation. thinking: before it answers, as far as its
    chat template lets one choose; auto: as the template has it. json_schema: what the answer has to be
    JSON of, behind its thoughts, as a text, unless it calls tools. must_call: names of tools, one of which
    the answer has to call with arguments of its schema; its text is JSON then, see
    chat.tool_formats.FORCED."""

    messages: tuple[Message, ...] = ()
    prompt: str | None = None
    max_new_tokens: int | None = None  # None: until the model stops or the context is full
    sampling: SamplingConfig = SamplingConfig()
    draft_length: DraftLength | None = None
    policy: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    strict: bool = False
    draft_only: bool = False
    switches: Switches = DEFAULT_SWITCHES
    continue_answer: bool = False
    tools: tuple[Tool, ...] = ()
    thinking: Thinking = "auto"
    json_schema: str | None = None
    must_call: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.json_schema is not None:
            check_schema(self.json_schema)
        self._check_held()
        if self.continue_answer and not (self.messages and self.messages[-1].role == "assistant"):
            raise ConfigError("There is no answer to continue: the last message has to be the assistant's.")
        given = bool(self.messages) + (self.prompt is not None) + (self.prompt_token_ids is not None)
        if given != 1:
            raise ConfigError(
                "A request needs either messages or a prompt (as text or as token ids), and not both."
            )
        if self.thinking not in THINKING:
            raise ConfigError(f"Thinking '{self.thinking}' is not known: use one of {', '.join(THINKING)}.")
        if self.draft_length is not None:
            check_draft_length(self.draft_length)
        _check_whole("Max new tokens", self.max_new_tokens)
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ConfigError(f"Max new tokens {self.max_new_tokens} is out of range: give at least 1.")

    def _check_held(self) -> None:
        """What an answer that is held to a form does not go with."""
        held = [("a schema", self.json_schema is not None), ("a call that has to be", bool(self.must_call))]
        others = [("an answer to continue", self.continue_answer), ("approximate answers", self.draft_only)]
        forms = [name for name, wanted in held if wanted]
        found = [*forms, *(name for name, wanted in others if wanted)]
        if forms and len(found) > 1:
            raise ConfigError(
                f"An answer with {found[0]} does not go with {found[1]}: leave one of both out."
            )
        unknown = [name for name in self.must_call if name not in [tool.name for tool in self.tools]]
        if unknown:
            raise ConfigError(f"No tool '{unknown[0]}' is offered, which has to be called: offer it.")
