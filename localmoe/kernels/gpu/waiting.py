"""Device code that finds how long a layer waited for experts that are not in the GPU's memory: by the GPU's
clock, at the end of each program. Takes no part in what is computed.

A layer's words are CLOCK_WORDS int64: for each of gate_up and down when it began, when the last program with
weights from VRAM ended, and the last one whose weights came over the link or were waited for; at last the
nanoseconds that the layer waited. `begin_layer` empties them, `end_layer` fills the last one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def now():
    """Nanoseconds."""
    return globaltimer()


@triton.jit
def begin_layer(clock):
    """In a kernel before gate_up."""
    word = tl.arange(0, 8)
    tl.store(clock + word, tl.zeros([8], tl.int64), mask=word < 7)


@triton.jit
def begin_kernel(clock):
    """In the first program of gate_up or down."""
    if tl.program_id(0) == 0:
        tl.store(clock, now())


@triton.jit
def end_program(clock, afar):
    """At the end of each program. afar: its weights came from elsewhere."""
    tl.atomic_max(clock + 1 + afar.to(tl.int32), now(), sem="relaxed", scope="gpu")


@triton.jit
def _waited_in(clock):
    """Nanoseconds of a kernel in which only programs ran whose weights came from elsewhere."""
    began, near, afar = tl.load(clock), tl.load(clock + 1), tl.load(clock + 2)
    return tl.maximum(afar - tl.maximum(near, began), 0)


@triton.jit
def end_layer(clock, for_answer):
    """In a kernel behind down, once. for_answer: nanoseconds that it waited for the CPU, after the GPU's own
    experts."""
    tl.store(clock + 6, _waited_in(clock) + _waited_in(clock + 3) + for_answer)
