"""Triton twin of kernels.activations: the gated activation inside a kernel, in float32.

A device function only; launches nothing and decides nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def apply_activation(
    gate: tl.tensor, up: tl.tensor, KIND: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr
) -> tl.tensor:
    """act(gate) * up of float32 tensors of one shape, as Activation.apply; an infinite LIMIT clamps nothing.

    Pass an Activation's kind, alpha and limit as the constants.
    """
    tl.static_assert(
        KIND == "silu" or KIND == "gelu" or KIND == "gelu_tanh" or KIND == "relu" or KIND == "swiglu_oai"
    )
    if LIMIT < 3.0e38:  # finite
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    if KIND == "silu":
        out = gate * tl.sigmoid(gate) * up
    elif KIND == "swiglu_oai":
        out = gate * tl.sigmoid(gate * ALPHA) * (up + 1.0)
    elif KIND == "relu":
        out = tl.maximum(gate, 0.0) * up
    elif KIND == "gelu":
        out = gate * 0.5 * (1.0 + tl.math.erf(gate * 0.7071067811865476)) * up
    else:  # 0.5 * (1 + tanh(z)) = sigmoid(2z)
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        out = gate * tl.sigmoid(2.0 * inner) * up
    return out
