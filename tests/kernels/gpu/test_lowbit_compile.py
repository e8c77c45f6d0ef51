"""The low-bit kernels compile for GPUs that are not here, with wide loads and little shared memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.kept_builds import kept_builds

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[3]

COMPILE = """
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from localmoe.kernels.activations import Activation
from localmoe.kernels.gpu import lowbit_experts as launch, lowbit_kernels as kernels
from localmoe.kernels.lowbit import LowBitExperts

def compile(kernel, constants, bits, capability, dtype):
    warps = constants.pop("num_warps")
    constants["DEPENDENT"] = capability >= 90
    types = dict.fromkeys(("x", "gated", "out", "bias"), f"*{dtype}")
    types |= {"index": "*i64", "weights": "*fp32", "words": "*i32", "scales": "*fp16"}
    types["codebooks"] = "*fp32" if constants["TABLE"] else "*fp16"
    types["top_bits"] = "*i16" if bits == 3 else "*i32"
    types["columns"] = "*i32" if constants.get("INDEXED") else "*i64"
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in types}
    built = triton.compile(
        ASTSource(kernel, signature, constants, attrs),
        target=GPUTarget("cuda", capability, 32), options={"num_warps": warps},
    )
    ptx = built.asm["ptx"]
    single = int(constants.get("INDEXED", False) or constants["TABLE"])
    counts = ptx.count("v4.b32"), ptx.count("ld.global")
    waits = int("griddepcontrol.wait" in ptx)
    print(kernel.__name__, capability, built.metadata.shared, *counts, single, waits)

gpt = Activation("swiglu_oai", 1.702, 7.0)
silu = Activation("silu")
ungated = Activation("relu", gated=False)
# of 4 bits once plain, once with biases, once with an index, which down knows nothing of, so that it is plain
ALL = (
    (89, "fp16", (8, 4096, 14336), 2, 4, False, silu, False, False),
    (90, "bf16", (32, 2880, 2880), 4, 4, True, gpt, False, False),
    (80, "bf16", (60, 2048, 1408), 4, 4, False, silu, True, False),
    (120, "bf16", (64, 2048, 1408), 6, 3, False, silu, False, False),
    (89, "bf16", (60, 2048, 1408), 4, 4, False, silu, False, True),
    (89, "bf16", (128, 2688, 1856), 6, 4, False, ungated, False, False),
)
for chosen in sys.argv[1:]:
    capability, dtype, (E, H, I), K, bits, biased, activation, indexed, codebook = ALL[int(chosen)]
    up_bias, down_bias = torch.empty(E, 2 * I, device="meta"), torch.empty(E, H, device="meta")
    biases = {"gate_up_bias": up_bias, "down_bias": down_bias} if biased else {}
    group = 64 if codebook else 128
    experts = LowBitExperts.empty(
        E, H, I, bits, group, "meta", gated=activation.gated, **biases, indexed=indexed, codebook=codebook
    )
    up, down = launch.choose_gate_up_tile(experts), launch.choose_down_tile(experts, K)
    up_constants = launch.gate_up_constants(experts, K, activation, up, ptx=True)
    down_constants = launch.down_constants(experts, K, down, ptx=True)
    compile(kernels.gate_up_kernel, up_constants, bits, capability, dtype)
    compile(kernels.down_kernel, down_constants, bits, capability, dtype)
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("chosen", ["0", "1 2 3 4 5"], ids=["plain", "the others"])
def test_kernels_compile_for_every_generation_with_wide_loads(
    chosen: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(kept_builds(pytestconfig, "lowbit")))
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *chosen.split()],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 2 * len(chosen.split())
    for name, capability, shared, wide_loads, loads, single, waits in lines:
        assert waits == str(int(int(capability) >= 90))
        assert int(shared) <= 99 << 10, (name, capability)
        assert int(wide_loads) >= 4, f"{name} for sm_{capability} reads its codes in small pieces"
        # indexed activations and a table's values are read one by one
        limit = 1200 if single == "1" else 120
        assert int(loads) < limit, f"{name} for sm_{capability} reads activations or scales in small pieces"
