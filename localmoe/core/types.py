"""The nouns that every package shares: expert keys, shapes of a model, progress. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from localmoe.core.tools import ToolCall

Phase = Literal["prefill", "draft", "verify"]
_FOUR_BITS = ("mxfp4", "nvfp4", "int4", "int4-32")  # forms of experts


class ExpertKey(NamedTuple):
    """A routed expert: MoE layer (0-based among the MoE layers) and expert index in that layer."""

    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class ModelFootprint:
    """What a model needs, in bytes and counts, known from its config and weight-file headers alone.

    Attributes:
        name: display name.
        architecture: the config's model_type.
        num_layers: MoE layers (dense layers are not counted).
        num_experts: routed experts a MoE layer.
        experts_per_token: experts that the router picks (top-k).
        expert_params: parameters of one routed expert (weights; biases stay with the shared part).
        own_inner_size: I of experts that are something else than three matrices of the model's hidden size;
            0 of others.
        expert_bytes: one routed expert in its host record, as 16-bit (or original) weights, or in codes.
        shared_params: parameters of everything else (attention, norms, embeddings, routers, shared
            experts, biases).
        shared_bytes: bytes of the same in the checkpoint's dtype.
        kv_bytes_per_token: KV cache bytes a token, all layers, in the checkpoint's dtype.
        sliding_kv_bytes_per_token, sliding_window: of those, what layers cache that see a window of so many
            positions alone; where steps run whole on a GPU, they keep no more than that and a pass.
        draft_expert_bytes: one expert's INT4 codes and scales on the device.
        max_context: longest context that the model's config allows.
        hidden_size, vocab_size: dimensions that size the workspace.
        can_rollback: whether the last tokens can be dropped again: of keys and values always, of recurrent
            state where steps run whole on a GPU, if the kernels know it.
        state_bytes: of a model with such recurrent state, what it takes there, for one sequence.
        state_row_bytes: of such a model, what a recurrent layer needs for a token of a prompt there.
        mxfp4_expert_bytes: of a model that is published in MXFP4, one expert kept so; 0 of others.
        bf12_expert_bytes: of a model whose experts are bfloat16, one that is packed into twelve bits a
            weight, without loss; 0 of others.
        coded_expert_bytes, coded_form: of a model that is published in FP8, NVFP4 or INT4, one expert kept
            so, and which of these it is (a value of kernels.weight_forms); 0 and "" of others.
        expert_form: in which experts are counted here, likewise, or "plain", "mxfp4" or "bf12".
        linear_params: of the shared ones, those of linear layers, which a CPU may keep in 16 bits.
        embedding_params: of the shared ones, those of an input embedding that nothing else uses; a pass reads
            a row a token of them, and they may lie in host RAM.
        head_saved_bytes: of shared_bytes, what a GPU does not need if the output head is packed into twelve
            bits a weight as well; 0 where it cannot be.
        packs_head: whether it is, wherever steps run whole on a GPU.
        draft_model_bytes, draft_model_kv_bytes_per_token: another model that drafts in the place of INT4
            experts, on the device; 0 where there is none.
        draft_model_called: what people call it.
        draft_model_foretells: whether it may say which experts the target's tokens will want.
        text_alone: whether it is the text part of a model that sees or hears too, of which nothing is read
            here.
        image_bytes: of a model that reads pictures, what the largest one takes meanwhile, in 16 bits.
        angles_per_token: numbers of 16 bits a position in its rotary tables, where steps run whole on a GPU.
        trained_context: of a model whose angles depend on the text's length, the longest context with which
            short texts have those that it was trained with; 0 of others.
    """

    name: str
    architecture: str
    num_layers: int
    num_experts: int
    experts_per_token: int
    expert_params: int
    expert_bytes: int
    shared_params: int
    shared_bytes: int
    kv_bytes_per_token: int
    draft_expert_bytes: int
    max_context: int
    hidden_size: int
    vocab_size: int
    can_rollback: bool
    state_bytes: int = 0
    state_row_bytes: int = 0
    mxfp4_expert_bytes: int = 0
    bf12_expert_bytes: int = 0
    coded_expert_bytes: int = 0
    coded_form: str = ""
    expert_form: str = "plain"
    linear_params: int = 0
    embedding_params: int = 0
    head_saved_bytes: int = 0
    packs_head: bool = False
    draft_model_bytes: int = 0
    draft_model_kv_bytes_per_token: int = 0
    draft_model_called: str = "the draft model"
    draft_model_foretells: bool = True
    own_inner_size: int = 0
    text_alone: bool = False
    image_bytes: int = 0
    angles_per_token: int = 0
    trained_context: int = 0
    sliding_kv_bytes_per_token: int = 0
    sliding_window: int = 0

    @property
    def keeps_mxfp4(self) -> bool:
        """Whether experts are kept in MXFP4, in host records and slots alike."""
        return self.expert_form == "mxfp4"

    @property
    def keeps_bf12(self) -> bool:
        """Whether experts are packed into twelve bits a weight, likewise."""
        return self.expert_form == "bf12"

    @property
    def keeps_four_bits(self) -> bool:
        """Whether experts are kept in about as many bits as an INT4 draft has."""
        return self.expert_form in _FOUR_BITS

    @property
    def keeps_codes(self) -> bool:
        """Whether slots hold what records hold, whatever is computed in."""
        return self.expert_form != "plain"

    def in_codes(self, *, packing: bool = True) -> ModelFootprint:
        """The same with experts kept as they are published, if that is in MXFP4, NVFP4, FP8 or INT4, or
        packed; the head packed too."""
        found = replace(self, packs_head=packing and self.head_saved_bytes > 0)
        if self.mxfp4_expert_bytes:
            return replace(found, expert_bytes=self.mxfp4_expert_bytes, expert_form="mxfp4")
        if packing and self.coded_expert_bytes:
            return replace(found, expert_bytes=self.coded_expert_bytes, expert_form=self.coded_form)
        if packing and self.bf12_expert_bytes:
            return replace(found, expert_bytes=self.bf12_expert_bytes, expert_form="bf12")
        return found

    def in_whole_passes(self) -> ModelFootprint:
        """The same where steps run whole on a GPU."""
        return replace(self, can_rollback=self.can_rollback or self.state_bytes > 0)

    def in_16_bits(self) -> ModelFootprint:
        """The same with experts decoded, if they are kept in codes, and the head likewise."""
        found = replace(self, packs_head=False)
        if not self.keeps_codes:
            return found
        return replace(found, expert_bytes=2 * self.expert_params, expert_form="plain")

    @property
    def packed_away_bytes(self) -> int:
        """Of shared_bytes, what packing saves where steps run whole on a GPU."""
        return self.head_saved_bytes if self.packs_head else 0

    @property
    def total_experts(self) -> int:
        """Routed experts of all layers."""
        return self.num_layers * self.num_experts

    @property
    def inner_size(self) -> int:
        """I of an expert's matrices."""
        return self.own_inner_size or -(-self.expert_params // (3 * self.hidden_size))

    def slot_bytes(self, compute_bytes: int) -> int:
        """One expert on the device, where a weight takes so much unless it is in codes."""
        return self.expert_bytes if self.keeps_codes else self.expert_params * compute_bytes

    def draft_bytes(self, positions: int) -> int:
        """What drafts, on the device: the low-bit experts, or another model with its cache of so many
        tokens."""
        if self.draft_model_bytes:
            return self.draft_model_bytes + self.draft_model_kv_bytes_per_token * positions
        return self.total_experts * self.draft_expert_bytes

    @property
    def total_params(self) -> int:
        """All parameters."""
        return self.shared_params + self.total_experts * self.expert_params

    @property
    def active_params(self) -> int:
        """Parameters that one token touches."""
        return self.shared_params + self.num_layers * self.experts_per_token * self.expert_params


@dataclass(frozen=True, slots=True)
class Progress:
    """One report of a long task (load, draft build, download): `done` of `total` in `unit`, within
    `stage`; how long the rest will take, where that can be told; and something to add, for people."""

    stage: str
    done: int
    total: int
    unit: Literal["bytes", "experts", "layers", "files"]
    seconds_left: float | None = None
    detail: str = ""


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Image:
    """A picture in a message.

    Attributes:
        data: an encoded file (see localmoe.vision.image_file for the formats).
        at: characters of what the message says before it.
    """

    data: bytes
    at: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message.

    Attributes:
        tool_calls: of the assistant, after what it says.
        tool_name, tool_call_id: whose result a tool's message is.
        thoughts: of the assistant, before what it says; many a template shows them between calls of tools.
        images: in the order in which they stand in what it says.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_name: str = ""
    tool_call_id: str = ""
    thoughts: str = ""
    images: tuple[Image, ...] = ()
