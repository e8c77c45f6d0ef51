"""Loops over all (layer, expert) cells that moe-speq runs several times a step, compiled by numba: as array
operations they took 0.3 to 0.5 ms of a step, most of it for starting some hundred of them. Importing this
compiles them, which takes seconds the first time; numba keeps what it made on disk.

Letters: L layers, E experts, T window tokens, K experts a token. A cell's number is layer * E + expert.
Arrays are contiguous and may be written to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from localmoe.kernels.compiled_loops import compile_loop

_LOG = logging.getLogger(__name__)
_Loop = TypeVar("_Loop", bound=Callable[..., Any])
_MASK, _MASKS, _COUNTS = "boolean[:,::1]", "boolean[:,:,::1]", "int32[:,::1]"
_FLOATS, _SCORES, _CELLS = "float64[::1]", "float64[:,::1]", "int64[::1]"


def compiled(result: str, *arguments: str) -> Callable[[_Loop], _Loop]:
    """A compiler for arguments of these types. Without numba a loop still runs, some ms a step."""

    def compile_it(loop: _Loop) -> _Loop:
        made: Any = loop
        try:
            made = compile_loop(loop, f"{result}({', '.join(arguments)})", "moe-speq")
        except ImportError as error:
            _LOG.warning("moe-speq's loops run uncompiled, which takes some ms a step: %s", error)
        return cast("_Loop", made)

    return compile_it


@compiled("void", "int64", _COUNTS, "float32[:,::1]", _COUNTS, _MASK, _MASKS)
def note_token(token: int, experts: Any, confidences: Any, wanted: Any, sure: Any, routed: Any) -> None:
    """Enter one token's choices into what prefetch.window_needs keeps.

    Args:
        experts, confidences: (L, K); an index outside the experts means "none".
        wanted, sure: (L, E). routed: (T, L, E).
    """
    num_layers, top_k = experts.shape
    for layer in range(num_layers):
        total = np.float32(0.0)
        for k in range(top_k):
            total += confidences[layer, k]
        for k in range(top_k):
            expert = experts[layer, k]
            if 0 <= expert < wanted.shape[1]:
                routed[token, layer, expert] = True
                wanted[layer, expert] += 1
                confident = 2 * top_k * confidences[layer, k] >= total
                if token == 0 or confident or wanted[layer, expert] > 1:
                    sure[layer, expert] = True


@compiled(_CELLS, _MASK, _MASK, _MASK, _FLOATS, "int64")
def pick_sure(sure: Any, here: Any, requested: Any, quota: Any, room: int) -> Any:
    """Cells that are sure, not here and not asked for, and mark them as asked for. Where they are more than
    `room`, layers that are furthest below their share of the slots are served first: a slot that moves from
    one layer to another is missed there.

    Args:
        sure, here, requested: (L, E). quota: (L,), slots that each layer should hold.
    """
    num_layers, num_experts = sure.shape
    cells = np.empty(num_layers * num_experts, np.int64)
    begins = np.empty(num_layers + 1, np.int64)  # of each layer's among them
    surplus = np.empty(num_layers, np.float64)  # slots that it holds, or will, beyond its share
    count = 0
    for layer in range(num_layers):
        begins[layer], held = count, 0
        for expert in range(num_experts):
            held += here[layer, expert]
            if sure[layer, expert] and not here[layer, expert] and not requested[layer, expert]:
                cells[count] = layer * num_experts + expert
                count += 1
        surplus[layer] = held - quota[layer]
    begins[num_layers] = count
    if count > room:
        chosen, following = np.empty(room, np.int64), begins[:-1].copy()
        for i in range(room):
            neediest = -1
            for layer in range(num_layers):
                waits = following[layer] < begins[layer + 1]
                if waits and (neediest < 0 or surplus[layer] < surplus[neediest]):
                    neediest = layer
            chosen[i] = cells[following[neediest]]
            following[neediest] += 1
            surplus[neediest] += 1.0
    else:
        chosen = cells[:count].copy()
    for cell in chosen:
        requested[cell // num_experts, cell % num_experts] = True
    return chosen


@compiled(_CELLS, _COUNTS, _MASK, _MASK, "float64")
def pick_in_time(wanted: Any, here: Any, requested: Any, copies_per_layer: float) -> Any:
    """Cells that are wanted, not here and not asked for, by layer, and mark them as asked for; only those
    whose copy, one after the other, is complete before their layer begins.

    Args:
        wanted, here, requested: (L, E). copies_per_layer: made while a layer runs; below 0: not known, and
            every copy is in time.
    """
    num_layers, num_experts = wanted.shape
    cells, count = np.empty(num_layers * num_experts, np.int64), 0
    for layer in range(num_layers):
        most = int(layer * copies_per_layer)  # complete by then
        for expert in range(num_experts):
            if copies_per_layer >= 0 and count >= most:
                break
            if wanted[layer, expert] > 0 and not here[layer, expert] and not requested[layer, expert]:
                requested[layer, expert] = True
                cells[count] = layer * num_experts + expert
                count += 1
    return cells[:count].copy()


@compiled("void", _SCORES, _MASK, _FLOATS, _MASK, _COUNTS, "float64", "float32[:,::1]")
def worth_now(
    reuse: Any, here: Any, quota: Any, demanded: Any, wanted: Any, over_share: float, worth: Any
) -> None:
    """What each expert is worth, (L, E): infinite if the window wants it, else its reuse score, one more
    where the pass at hand demanded it, and less `over_share` in layers that hold more than their quota."""
    num_layers, num_experts = reuse.shape
    for layer in range(num_layers):
        held = 0
        for expert in range(num_experts):
            held += here[layer, expert]
        less = over_share if held > quota[layer] else 0.0
        for expert in range(num_experts):
            if wanted[layer, expert] > 0:
                worth[layer, expert] = np.inf
            else:
                worth[layer, expert] = reuse[layer, expert] - less + demanded[layer, expert]


@compiled("void", _MASK, _MASKS, _SCORES, _SCORES, _SCORES)
def add_uses(demanded: Any, routed: Any, counts: Any, recent: Any, frequency: Any) -> None:
    """Count a window's uses; see prefetch.reuse.

    Args:
        demanded: (L, E), what the target used. routed: (T, L, E), what the draft said of each token.
        counts: (T + 1, 2), what a use by each token adds to R and to F, and one that was not foreseen.
        recent, frequency: (L, E), R and F.
    """
    num_tokens, num_layers, num_experts = routed.shape
    for layer in range(num_layers):
        for expert in range(num_experts):
            if not demanded[layer, expert]:
                continue
            foreseen = False
            for token in range(num_tokens):
                if routed[token, layer, expert]:
                    foreseen = True
                    recent[layer, expert] += counts[token, 0]
                    frequency[layer, expert] += counts[token, 1]
            if not foreseen:
                recent[layer, expert] += counts[num_tokens, 0]
                frequency[layer, expert] += counts[num_tokens, 1]
