"""Bytes that each part of a model needs on the device and in host RAM, from its footprint. Divides no budget;
see plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NotRequired, TypedDict

from localmoe.core.types import ModelFootprint
from localmoe.kernels.attention import KV_BLOCK

PREFILL_CHUNK = 256  # tokens of a prompt in one pass, at most
DEVICE_PREFILL_CHUNK = 1024  # the same where steps run whole on a GPU, at least (see prefill_chunk)
PASS_PADDING = 80  # rows that the widest pass may be padded to
_ATTENTION_ROWS = 128  # query rows that attention handles at once
_FLOAT_BYTES = 4
_HALF_BYTES = 2
_ROUTER_BYTES = 8 + 4  # a choice and its weight
# partial results of attention, or a prompt in latent space
_KERNEL_ATTENTION_BYTES = 40 << 20
# what the allocator's rounding and the graphs' memory pool leave unused: up to 220 MB of GLM 4.7 Flash, of
# which the logits' part makes up for 90
_FRAGMENT_BYTES = 96 << 20


class NeedsOptions(TypedDict):
    """What of a machine and its engine `device_needs` goes by; see there."""

    compute_bytes: int
    checkpoint_bytes_per_weight: int
    max_window: int
    library_bytes: NotRequired[int]
    whole_passes: NotRequired[bool]
    in_place: NotRequired[bool]
    on_disk: NotRequired[bool]
    prefill_chunk: NotRequired[int]


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """Bytes on the device; `draft_bytes` count only when drafting. `record_bytes`, `embedding_bytes`,
    `aside_bytes`: of host RAM, the last ones for keys and values that answers overwrite. `disk_bytes`: of a
    file in which the records lie, if they do not in RAM."""

    shared_bytes: int
    kv_bytes: int
    workspace_bytes: int
    draft_bytes: int
    slot_bytes: int
    min_slots: int
    max_slots: int
    record_bytes: int
    embedding_bytes: int
    aside_bytes: int = 0
    disk_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """In host RAM: the experts' records, and what lies there beside them."""
        return self.record_bytes + self.embedding_bytes + self.aside_bytes

    def fixed_bytes(self, *, drafting: bool) -> int:
        """Everything but the slots."""
        draft = self.draft_bytes if drafting else 0
        return self.shared_bytes + self.kv_bytes + self.workspace_bytes + draft

    def least_bytes(self, *, drafting: bool) -> int:
        """The smallest budget that works."""
        return self.fixed_bytes(drafting=drafting) + self.min_slots * self.slot_bytes

    def most_bytes(self, *, drafting: bool) -> int:
        """The budget with which every expert has a slot; more would lie idle."""
        return self.fixed_bytes(drafting=drafting) + self.max_slots * self.slot_bytes


def kv_positions(context: int) -> int:
    """Positions to allocate for a context: a pass may be padded past its end by rows that are dropped again,
    and attention reads whole blocks."""
    return -(-(context + PASS_PADDING - 1) // KV_BLOCK) * KV_BLOCK


def ring_positions(window: int) -> int:
    """Positions of a layer whose rows see `window` of them, where steps run whole on a GPU: what a row of a
    prompt's pass sees, that pass if it is of the usual length, and as far as drafts and padding may go ahead.
    """
    return -(-(window + DEVICE_PREFILL_CHUNK + 2 * PASS_PADDING) // KV_BLOCK) * KV_BLOCK


def cache_positions(positions: int, window: int | None) -> int:
    """Positions that a layer keeps there of so many; window: None where its rows see all."""
    return positions if window is None else min(positions, ring_positions(window))


def device_needs(
    footprint: ModelFootprint,
    *,
    context: int,
    compute_bytes: int,
    checkpoint_bytes_per_weight: int,
    max_window: int,
    library_bytes: int = 0,
    whole_passes: bool = False,
    in_place: bool = False,
    on_disk: bool = False,
    prefill_chunk: int = DEVICE_PREFILL_CHUNK,
) -> DeviceNeeds:
    """Needs for one sequence of `context` tokens.

    Args:
        compute_bytes: bytes a weight on the device.
        checkpoint_bytes_per_weight: bytes a weight in the checkpoint, which the footprint's bytes count.
        max_window: most tokens verified in one pass.
        library_bytes: what the matrix library takes for itself.
        whole_passes: steps run whole on the GPU, in kernels that keep little, and prompts in longer passes;
            the input embedding lies in host RAM, and the output head may be packed.
        in_place: experts are computed where their host records lie, so a slot takes nothing, and linear
            layers from the checkpoint's dtype, in which the embedding stays too.
        on_disk: all experts lie in a file; how many of them RAM holds is the plan's decision.
        prefill_chunk: most tokens of a prompt in one of the whole passes.
    """

    def on_device(checkpoint_bytes: int) -> int:
        return -(-checkpoint_bytes * compute_bytes // checkpoint_bytes_per_weight)

    positions = kv_positions(context)
    unpacked_bytes = footprint.expert_params * compute_bytes
    kv_layer_floats = -(-footprint.kv_bytes_per_token // (footprint.num_layers * checkpoint_bytes_per_weight))
    chunk = prefill_chunk if whole_passes else PREFILL_CHUNK
    tokens = max(min(chunk, context), max_window)
    if whole_passes:
        activations = _kernel_bytes(footprint, tokens)
        attention = _KERNEL_ATTENTION_BYTES + _FRAGMENT_BYTES
        attention += footprint.angles_per_token * positions * _HALF_BYTES
    else:
        activations = _activation_bytes(footprint, tokens)
        attention = _attention_bytes(footprint, tokens, positions, kv_layer_floats)
    # where kernels choose tokens: logits as computed, as kept, and as float32 for a draft by another model;
    # else the probabilities of draft and target too
    logits = max_window * footprint.vocab_size * (compute_bytes + 3 * _FLOAT_BYTES)
    if whole_passes:
        logits = max_window * footprint.vocab_size * (2 * compute_bytes + _FLOAT_BYTES)
    shared_bytes = on_device(footprint.shared_bytes)
    embedding_bytes = 0
    if whole_passes or in_place:
        shared_bytes -= footprint.embedding_params * compute_bytes
        embedding_bytes = footprint.embedding_params * checkpoint_bytes_per_weight
    kv_bytes, aside_bytes = on_device(footprint.kv_bytes_per_token) * positions, 0
    if whole_passes:
        kv_bytes += footprint.state_bytes
        sliding = on_device(footprint.sliding_kv_bytes_per_token)
        kept = cache_positions(positions, footprint.sliding_window)
        kv_bytes -= sliding * (positions - kept)
        aside_bytes = sliding * kept if kept < positions else 0
        shared_bytes -= footprint.packed_away_bytes
    if in_place:  # linear layers keep their dtype
        shared_bytes -= footprint.linear_params * (compute_bytes - checkpoint_bytes_per_weight)
    # where experts are computed in place a CPU reads pictures, which needs less
    image_bytes = footprint.image_bytes * (1 if in_place else compute_bytes // _HALF_BYTES)
    record_bytes = footprint.total_experts * footprint.expert_bytes  # in the checkpoint's dtype, or codes
    return DeviceNeeds(
        shared_bytes=shared_bytes,
        kv_bytes=kv_bytes,
        workspace_bytes=activations + attention + logits + unpacked_bytes + library_bytes + image_bytes,
        draft_bytes=footprint.draft_bytes(positions),
        slot_bytes=0 if in_place else footprint.slot_bytes(compute_bytes),
        min_slots=min(max(2, footprint.experts_per_token), footprint.total_experts),
        max_slots=footprint.total_experts,
        record_bytes=0 if on_disk else record_bytes,
        embedding_bytes=embedding_bytes,
        aside_bytes=aside_bytes,
        disk_bytes=record_bytes if on_disk else 0,
    )


def _activation_bytes(footprint: ModelFootprint, tokens: int) -> int:
    """A layer's activations in float32: some sixteen tensors of the hidden size (residual, norms, q, k, v,
    attention output, shared expert), and for each chosen expert gate, up and product, its input and its
    output."""
    hidden = footprint.hidden_size
    inner = footprint.inner_size
    return tokens * (16 * hidden + footprint.experts_per_token * (3 * inner + 2 * hidden)) * _FLOAT_BYTES


def _kernel_bytes(footprint: ModelFootprint, tokens: int) -> int:
    """A layer's activations in 16 bits: some sixteen tensors of the hidden size, or, if that is more, what a
    recurrent layer needs beside its input and the residual. What all routers chose; and what experts compute,
    but for a pass longer than DEVICE_PREFILL_CHUNK, whose experts compute in slots."""
    routers = footprint.num_layers * footprint.experts_per_token * _ROUTER_BYTES
    routed = min(tokens, DEVICE_PREFILL_CHUNK) * expert_row_bytes(footprint)
    hidden = footprint.hidden_size * _HALF_BYTES
    layer = max(16 * hidden, 2 * hidden + footprint.state_row_bytes)
    return tokens * (layer + routers) + routed


def expert_row_bytes(footprint: ModelFootprint) -> int:
    """What a layer's experts need for a token in kernels: the product of gate and up of each chosen one, and
    its output in float32."""
    return footprint.experts_per_token * (
        footprint.inner_size * _HALF_BYTES + footprint.hidden_size * _FLOAT_BYTES
    )


def _attention_bytes(footprint: ModelFootprint, rows: int, positions: int, kv_layer_floats: int) -> int:
    """Float32 scores of one layer (three tensors at the peak), and its keys and values as float32. A
    footprint does not count heads; one for every 40 of the hidden size is as many as real models have."""
    heads = -(-footprint.hidden_size // 40)
    return (3 * heads * min(rows, _ATTENTION_ROWS) + kv_layer_floats) * positions * _FLOAT_BYTES
