"""The shared KV cache where passes run on the GPU without the host: positions are read on the device. Keeps
the rules of model.kv_cache otherwise. Recurrent layers keep a state instead (device_states), which
can go back to where the last window began, or to one other place; those that see a window of positions keep
no more than that and what passes may write (device_rings)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from localmoe.hardware.needs import PASS_PADDING, cache_positions
from localmoe.kernels.gpu.rope import write_kv
from localmoe.kernels.gpu.state_places import PROMPT
from localmoe.model.device_rings import SlidingRings
from localmoe.model.device_states import RecurrentStates
from localmoe.model.device_window import DeviceWindow
from localmoe.model.kv_cache import KVCache, KVLayer
from localmoe.model.prompt_ways import BEFORE_THE_END
from localmoe.model.sequence_copy import SequenceCopy, from_host, to_host

# positions past a window's first that it and the drafts of the next one may write
_WRITTEN_AHEAD = 2 * PASS_PADDING


class _Room:
    """One allocation for all layers: the allocator would round each one's up."""

    def __init__(self, num_layers: int, num_bytes: int | None) -> None:
        """num_bytes: that they take together, where that is known."""
        self._num_layers, self._num_bytes = num_layers, num_bytes
        self._left: Tensor | None = None

    def take(self, shapes: Sequence[Sequence[int]], like: Tensor) -> list[Tensor]:
        """Zeros of one layer. Where nothing is known, none is thought to need more than the first one; one
        that does gets its own."""
        counts = [math.prod(shape) for shape in shapes]
        if self._left is None:
            known = self._num_bytes
            total = self._num_layers * sum(counts) if known is None else known // like.element_size()
            self._left = like.new_zeros(total)
        if sum(counts) > len(self._left) or self._left.dtype != like.dtype:
            return [like.new_zeros(shape) for shape in shapes]
        *parts, self._left = self._left.tensor_split(list(itertools.accumulate(counts)))
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def release(self) -> None:
        """Forget it."""
        self._left = None


class DeviceKVLayer(KVLayer):
    """Keys and values of one decoder layer; the runner keeps its length. ring: position p lies at p modulo
    its capacity."""

    def __init__(self, capacity: int, window: DeviceWindow, room: _Room, *, ring: bool = False) -> None:
        super().__init__(capacity)
        self._window = window
        self._room = room
        self.ring = ring

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Zeros of the cache's room."""
        shapes = [(1, t.shape[1], self.capacity, t.shape[3]) for t in (key_states, value_states)]
        self.keys, self.values = self._room.take(shapes, key_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write (1, kv_heads, T, head_dim) at the pass's position; return what the pass may look at."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        unrolled = self._window.unrolled
        if self.ring and unrolled is not None:
            whole = unrolled.join(self.keys, key_states), unrolled.join(self.values, value_states)
            keys, values = (states[:, :, -unrolled.kept :] for states in (key_states, value_states))
            write_kv(keys, values, self.keys, self.values, unrolled.kept_at, ring=True)
            return whole
        write_kv(key_states, value_states, self.keys, self.values, self._window.at, ring=self.ring)
        if self.ring:
            return self.keys, self.values
        visible = self._window.visible
        return self.keys[:, :, :visible], self.values[:, :, :visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(mask columns, offset); no mask is built."""
        return self._window.visible, 0


class DeviceKVCache(KVCache):
    """One DeviceKVLayer a decoder layer; recurrent ones stay empty. states: the state of these; rings: the
    layers that keep a window."""

    def __init__(
        self,
        num_layers: int,
        capacity: int,
        window: DeviceWindow,
        states: RecurrentStates | None = None,
        kv_bytes: int | None = None,
        windows: Mapping[int, int] | None = None,
    ) -> None:
        """kv_bytes: of all keys and values, where that is known: layers may differ. windows: positions that
        a row sees in each layer that sees no others, of a model without recurrent layers."""
        assert not (states and windows), "a state cannot go back as far as a ring"
        super().__init__(num_layers, capacity)
        self.states, self._window = states, window
        self._capacity = KVLayer(capacity).capacity
        stateful = () if states is None else states.layers
        self._room = _Room(num_layers - len(stateful), kv_bytes)
        self.layers = []
        for layer in range(num_layers):
            kept = cache_positions(self._capacity, (windows or {}).get(layer))
            self.layers.append(DeviceKVLayer(kept, window, self._room, ring=kept < self._capacity))
        sliding = {layer: seen for layer, seen in (windows or {}).items() if self.layers[layer].ring}
        self.rings = SlidingRings([self.layers[layer] for layer in sliding], list(sliding.values()))
        self._with_keys = [layer for index, layer in enumerate(self.layers) if index not in stateful]
        self._forget()

    def _forget(self) -> None:
        """No text is held."""
        self._base, self._reach = 0, 0  # positions between which the state can be had
        self._kept = 0  # another one that can be; 0: there is none
        self.rings.forget()

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self._capacity

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return super().num_bytes + (0 if self.states is None else self.states.num_bytes)

    def has_previous_state(self, *args: object) -> bool:
        """What transformers asks before it makes masks of which nothing is used here."""
        return True

    def keepable(self, length: int) -> int:
        """So many of the first `length` tokens can be kept."""
        length = min(length, self.length)
        if self.states is None:
            return self.rings.keepable(length)
        return _keepable(length, self._base, self._reach, self._kept)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, none or as many as can be kept."""
        if self.states is not None and length < self._base:
            assert length in (0, self._kept), f"{length} of {self._base} tokens, {self._kept} were kept"
            if length:
                self.states.go_back(length)
            self._base = self._reach = length
        if length < self._kept:
            self._kept = 0
        self.rings.truncate(length)
        super().truncate(length)

    def _parts(self) -> Iterator[Tensor]:
        """Of layers that keep all positions."""
        for layer in self._with_keys:
            if not layer.ring and layer.is_initialized:
                yield from (layer.keys, layer.values)

    @property
    def copy_bytes(self) -> int:
        """Of all that the text needs."""
        return super().copy_bytes + self.rings.copy_bytes + (self.states.num_bytes if self.states else 0)

    def copy_out(self) -> SequenceCopy:
        """All that the text needs, in host RAM."""
        length, place = self.length, (self._base, self._reach, self._kept)
        parts = to_host(self._parts(), length)
        rings = self.rings.copy_out(parts)
        if self.states is not None:
            self.states.copy_out(parts)

        def keepable(wanted: int) -> int:
            wanted = min(wanted, length)
            return self.rings.keepable(wanted, rings) if self.states is None else _keepable(wanted, *place)

        return SequenceCopy(length, tuple(parts), (rings, place), keepable)

    def bring_back(self, kept: SequenceCopy) -> None:
        """Hold what a copy holds."""
        parts, (rings, place) = iter(kept.parts), kept.facts
        self.truncate(0)  # an interruption leaves nothing
        with torch.inference_mode():
            own = list(self._parts())
            from_host(itertools.islice(parts, len(own)), own, cut=True)
        self.rings.bring_back(rings, parts)
        if self.states is not None:
            self.states.bring_back(parts)
        self._base, self._reach, self._kept = place
        self.advance(kept.length)

    def copy_states(self) -> list[Tensor] | None:
        """The state of recurrent layers, in host RAM, for a prompt's pass that may have to be run again, from
        where it began; None: there are no such layers."""
        if self.states is None:
            return None
        parts: list[Tensor] = []
        self.states.copy_out(parts)
        return parts

    def bring_states_back(self, parts: list[Tensor]) -> None:
        """As they were when they were copied; such a pass has to be begun next."""
        assert self.states is not None, "nothing was copied"
        self.states.bring_back(iter(parts))

    def release(self) -> None:
        """Forget all tokens and give the memory back."""
        super().release()
        self._room.release()
        self.rings.release()
        self._forget()
        if self.states is not None:
            self.states.release()

    @torch.inference_mode()  # as the passes that made it
    def wipe(self) -> None:
        """Back to zeros; no text was there."""
        for layer in self._with_keys:
            if layer.keys is not None:  # a layer may be but experts
                layer.keys.zero_()
                layer.values.zero_()
        self._forget()

    def advance(self, length: int) -> None:
        """A pass has written positions up to `length`."""
        assert length <= self.capacity, f"{length} positions in a cache of {self.capacity}"
        for layer in self.layers:
            layer.length = length

    # -- what passes are issued for, and where in their stream order they begin

    def expect_window(self, start: int, count: int) -> None:
        """A window's pass is issued, of which any number of tokens may be kept."""
        self.rings.expect(start, start + _WRITTEN_AHEAD)
        self._base, self._reach = start, start + count

    def begin_prompt(self, start: int, count: int) -> None:
        """Before the first layer of a prompt's pass, which is kept whole. The state shortly before its end is
        kept aside: the next turn of a chat may have another end there, and no thoughts behind it."""
        self.keep_at(start + count - BEFORE_THE_END, start)
        self.rings.expect(start, start + count)
        self._window.unrolled = self.rings.unroll(start, count, self._window.at.device)
        if self.states is not None:
            self.states.begin(PROMPT)
        self._base = self._reach = start + count

    def end_prompt(self) -> None:
        """All layers of a prompt's pass were issued."""
        self._window.unrolled = None

    def keep_at(self, position: int, start: int) -> None:
        """The pass that is issued next, from `start` on, keeps aside the state of that position, or of where
        it begins if that is later, for whoever goes back there."""
        position = max(position, start)
        self.rings.mark(position)
        if self.states is not None and position > 0:
            self.states.keep_before(position - start)
            self._kept = position

    def begin_pass(self, kind: int) -> None:
        """Of kernels.gpu.state_places, before its first layer."""
        if self.states is not None:
            self.states.begin(kind)


def _keepable(length: int, base: int, reach: int, kept: int) -> int:
    """So many of the first `length` tokens, by the places whose state can be had."""
    found = min(length, reach)
    if found >= base:
        return found
    return kept if kept <= length else 0
