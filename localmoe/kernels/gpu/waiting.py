"""Device code that finds how long a layer waited for experts that are not in the GPU's memory: how much
longer they took, by the GPU's clock, than reading them from there would have. Takes no part in what is
computed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from localmoe.kernels.residency import WAITED_NS

# a layer's words, see ResidencyView.clock
_BEGAN, _AT_LEAST, _WAITED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(WAITED_NS)


@triton.jit
def now():
    """Nanoseconds."""
    return globaltimer()


@triton.jit
def foresee(clock, experts, elsewhere, expert_ns):
    """Before the layer's experts, once: how long they take at least. experts: that the GPU computes.
    elsewhere: how many experts are not in VRAM yet, or computed by the CPU."""
    at_least = tl.where(elsewhere > 0, experts * expert_ns, -1)
    tl.store(clock + _AT_LEAST, at_least.to(tl.int64))


@triton.jit
def begin_experts(clock):
    """In the first kernel that reads experts."""
    if tl.program_id(0) == 0:
        tl.store(clock + _BEGAN, now())


@triton.jit
def end_experts(clock):
    """Once all is there, the CPU's answer too; by one program."""
    at_least = tl.load(clock + _AT_LEAST)
    longer = now() - tl.load(clock + _BEGAN) - at_least
    tl.store(clock + _WAITED, tl.where(at_least < 0, 0, tl.maximum(longer, 0)))
