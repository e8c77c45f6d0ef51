"""One pass of tokens through the model, as draft or target, over the shared KV cache. Chooses no tokens.

Target passes are padded to a multiple of rows, so that a token's logits do not depend on how many tokens are
verified with it (kernels.rows). Padding rows demand no experts and leave nothing in the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor

from localmoe.core.config import SamplingConfig
from localmoe.core.lookahead import LookaheadBuffer
from localmoe.core.stats import GenerationCounters
from localmoe.core.timeline import Timeline
from localmoe.core.types import Phase
from localmoe.experts.in_place import InPlaceMemory
from localmoe.hardware.needs import PREFILL_CHUNK
from localmoe.kernels.rows import RowPadding
from localmoe.model.cached_pass import cached_pass
from localmoe.model.experts_runtime import PassState
from localmoe.model.final_hidden import FinalHidden, HiddenListener
from localmoe.model.image_rows import ImageRows
from localmoe.model.sequence_copy import SequenceCopy, put_together, take_apart
from localmoe.model.synthetic import SyntheticModel
from localmoe.prefetch.scheduler import Scheduler


class SequenceState(Protocol):
    """The model's memory of the tokens so far: KVCache, or RecurrentState where nothing can be dropped."""

    @property
    def length(self) -> int:
        """Tokens held."""

    def keepable(self, length: int) -> int:
        """The most of the first `length` tokens that can be kept."""

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, if they can be."""

    def release(self) -> None:
        """Forget all tokens and give the memory back."""

    def wipe(self) -> None:
        """Forget all tokens, and numbers in their place that are none."""

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""

    @property
    def copy_bytes(self) -> int:
        """Bytes of a copy of what it holds now, about."""

    def copy_out(self) -> SequenceCopy:
        """What it holds, in host RAM."""

    def bring_back(self, kept: SequenceCopy) -> None:
        """Hold what a copy of its own holds, instead of what it does. An exception leaves the latter, or
        nothing."""


class PassCommons(Protocol):
    """What all kinds of passes share."""

    rows: RowPadding
    counters: GenerationCounters
    synthetic: SyntheticModel | None
    timeline: Timeline | None

    @property
    def scheduler(self) -> Scheduler:
        """Whom events are told to."""

    @property
    def lookahead(self) -> LookaheadBuffer:
        """What the draft's routers chose."""


class PassRunner(Protocol):
    """Runs passes of one model over one sequence state."""

    @property
    def sequence(self) -> SequenceState:
        """The tokens so far."""

    @property
    def passes(self) -> PassCommons:
        """State of the passes."""

    def prefill_rows(self, left: int) -> int:
        """Tokens of a prompt in its next pass, of `left` that are to come."""

    @property
    def capture_s(self) -> float:
        """Seconds so far that went by with preparing passes, once for each kind; they tell nothing of its
        speed."""

    def capture_ahead(self, sampling: SamplingConfig | None) -> bool:
        """While no answer is written: prepare one kind of pass that those to come will likely need, which
        choose so (None: as the last one); False where none is left."""

    def run(self, tokens: Sequence[int], phase: Phase, *, last_only: bool) -> Tensor:
        """Append tokens to the sequence; their logits (n, V), or the last one's (1, V)."""

    def begin_draft_token(self, position: int) -> None:
        """The next draft pass is of this window token."""

    def rewind(self, length: int) -> None:
        """After an interrupted pass: go back to `length` tokens, or to none."""


class RecurrentState(transformers.DynamicCache):
    """State of a model with recurrent layers: it can be extended or forgotten, but not shortened."""

    def __init__(self, config: Any, *, goes_on: bool = True) -> None:
        """goes_on: whether the model goes on from it in passes of several tokens (see model.recurrence)."""
        super().__init__(config=config)
        self._config = config
        self.goes_on = goes_on

    @property
    def length(self) -> int:
        """Tokens held."""
        return int(self.get_seq_length())

    def keepable(self, length: int) -> int:
        """All, or nothing."""
        return self.length if length >= self.length else 0

    def truncate(self, length: int) -> None:
        """Keep all, or nothing."""
        if length == self.length > 0:
            return
        assert length == 0, "recurrent state cannot be rolled back"
        self.release()  # of no tokens too: an interrupted first pass may not have come to what counts them

    def wipe(self) -> None:
        """Forget all tokens and what they left."""
        self.release()

    def release(self) -> None:
        """Forget all tokens and give the memory back."""
        self.layers = transformers.DynamicCache(config=self._config).layers

    @property
    def copy_bytes(self) -> int:
        """All of it."""
        return self.num_bytes

    def copy_out(self) -> SequenceCopy:
        """All of it, in host RAM."""
        parts: list[Tensor] = []
        layers = [(_empty(layer), take_apart(vars(layer), parts)) for layer in self.layers]
        length = self.length
        return SequenceCopy(length, tuple(parts), layers, lambda wanted: length if wanted >= length else 0)

    def bring_back(self, kept: SequenceCopy) -> None:
        """Hold what a copy holds."""
        layers = []
        for like, values in kept.facts:
            layer = copy(like)
            vars(layer).update(put_together(values, kept.parts))
            layers.append(layer)
        self.layers = layers  # at once: an interruption leaves what was held

    @property
    def num_bytes(self) -> int:
        """Bytes of every tensor in the state."""
        return sum(_tensor_bytes(value) for layer in self.layers for value in vars(layer).values())


def _empty(layer: Any) -> Any:
    """One of the same class that holds nothing."""
    made = copy(layer)
    vars(made).clear()
    return made


def _tensor_bytes(value: object) -> int:
    """Bytes of a tensor, or of the tensors in a list, tuple or dict."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(_tensor_bytes(entry) for entry in value.values())
    if isinstance(value, (list, tuple)):
        return sum(_tensor_bytes(entry) for entry in value)
    return 0


class ModelRunner:
    """Runs passes of one model over one sequence state."""

    def __init__(self, model: Any, state: SequenceState, passes: PassState, device: torch.device) -> None:
        self.sequence = state
        self.passes = passes
        self.device = device
        self._model = model
        self._pad = isinstance(state, transformers.Cache) and not isinstance(state, RecurrentState)
        self._listener: tuple[HiddenListener, FinalHidden] | None = None
        self.images: ImageRows | None = None  # of a model that reads pictures

    def listen(self, listener: HiddenListener, final: FinalHidden) -> None:
        """Tell it of each of the target's passes. final: of the model."""
        self._listener = listener, final

    @property
    def capture_s(self) -> float:
        """Passes need no preparation."""
        return 0.0

    def capture_ahead(self, sampling: SamplingConfig | None) -> bool:
        """Nor can anything be done ahead."""
        return False

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], phase: Phase, *, last_only: bool) -> Tensor:
        """Append tokens to the sequence and return their logits.

        Args:
            tokens: n token ids that follow what the sequence state holds.
            phase: "draft" uses the INT4 experts, anything else the target's.
            last_only: return the last token's logits alone.

        Returns:
            float32 (n, V), or (1, V) with last_only.
        """
        start, count = self.sequence.length, len(tokens)
        if phase == "prefill" and self.images is not None and self.images.has_some(start, count):
            with self.images.of_pass(tokens, start, self.device) as numbers:
                return self._run(tokens, numbers, phase, last_only=last_only)
        return self._run(tokens, tokens, phase, last_only=last_only)

    def _run(self, tokens: Sequence[int], numbers: Sequence[int], phase: Phase, *, last_only: bool) -> Tensor:
        """numbers: what the embedding is given for the tokens."""
        start, count = self.sequence.length, len(tokens)
        if start and count > 1 and isinstance(self.sequence, RecurrentState) and not self.sequence.goes_on:
            pairs = zip(tokens, numbers, strict=True)
            alone = [self._run([token], [number], phase, last_only=True) for token, number in pairs]
            return alone[-1] if last_only else torch.cat(alone)
        multiple = self.passes.rows.multiple if self._pad and phase != "draft" else 1
        padding = -count % multiple
        self.passes.phase, self.passes.live_rows = phase, count
        self.passes.forced_index = self._forced_index(phase, start, count)
        ids = torch.tensor([[*numbers, *[numbers[-1]] * padding]], device=self.device)
        positions = torch.arange(start, start + count + padding, device=self.device)[None]
        keep = multiple if last_only else 0  # whole row multiples, 0 keeps all
        if self.passes.linears is not None:
            self.passes.linears.begin_pass(count + padding, padding)
        memory = self.passes.memory
        by_lane = memory if isinstance(memory, InPlaceMemory) and phase != "draft" else None
        try:
            with nullcontext() if by_lane is None else by_lane.one_pytorch_thread():
                logits = cached_pass(self._model, ids, positions, self.sequence, keep=keep)[0]
        except BaseException:
            self.rewind(start)
            raise
        if padding:
            self.sequence.truncate(start + count)
            logits = logits[:-padding]
        if self._listener is not None:
            listener, hidden = self._listener
            listener.hear(start, tokens, hidden.take()[:count])
        return logits[-1:].float() if last_only else logits.float()

    def prefill_rows(self, left: int) -> int:
        """Tokens of a prompt in its next pass, of `left` that are to come."""
        rows = min(left, PREFILL_CHUNK)
        return rows if self.images is None else self.images.cut(self.sequence.length, rows)

    def begin_draft_token(self, position: int) -> None:
        """The next draft pass is of this window token."""
        self.passes.draft_token = position

    def _forced_index(self, phase: Phase, start: int, count: int) -> Tensor | None:
        """(count, L, K) experts that a simulation gives to the positions from `start` on, if one runs."""
        synthetic = self.passes.synthetic
        forced = None if synthetic is None else synthetic.forced(phase, start, count)
        return None if forced is None else torch.from_numpy(forced).to(self.device)

    def rewind(self, length: int) -> None:
        """After an interrupted pass: go back to `length` tokens, or to none where the state cannot be
        shortened."""
        can_shorten = not isinstance(self.sequence, RecurrentState)
        self.sequence.truncate(min(length, self.sequence.length) if can_shorten else 0)
