"""Makes the golden files of this folder with public GPTQ packers, in an environment of their own.

    python make_golden.py AUTO_GPTQ_FOLDER     (the unpacked wheel of auto-gptq 0.7.1; gptqmodel is installed)

One file per number of bits: integer `codes` (N, K) and `scale` (N, groups) as the input, a `g_idx` in order
and one in activation order, and what the packers make of them. Both packers and both orders must agree on
every tensor they share, or nothing is written.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

ROWS, COLUMNS, GROUP = 32, 96, 64  # the last group is half as long
HERE = Path(__file__).resolve().parent


def inputs(bits: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (ROWS, COLUMNS), generator=generator, dtype=torch.int32)
    scale = (torch.rand(ROWS, 2, generator=generator) + 0.5) / 64
    scale[::5] *= -1  # searched scales may be negative
    in_order = torch.arange(COLUMNS, dtype=torch.int32) // GROUP
    shuffled = in_order[torch.randperm(COLUMNS, generator=generator)]
    return {"codes": codes, "scale": scale.half(), "in_order": in_order, "act_order": shuffled}


def as_linear(values: dict[str, torch.Tensor], g_idx: torch.Tensor, bits: int) -> torch.nn.Linear:
    scale = values["scale"].float()[:, g_idx.long()]
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = scale * (values["codes"].float() - (1 << bits - 1))
    return linear


def by_gptqmodel(values: dict[str, torch.Tensor], g_idx: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    module = TorchLinear(
        bits=bits, group_size=GROUP, sym=True, desc_act=True, in_features=COLUMNS, out_features=ROWS,
        bias=False, pack_dtype=torch.int32, register_buffers=True,
    )  # fmt: skip
    zeros = torch.full((ROWS, 2), float(1 << bits - 1))
    linear = as_linear(values, g_idx, bits)
    module.pack_original(linear, values["scale"].float(), zeros, g_idx)
    packed = {name: getattr(module, name).clone() for name in ("qweight", "scales", "g_idx")}
    packed["qzeros_v2"] = module.qzeros.clone()
    module.qzero_format(format=2)
    config = types.SimpleNamespace(bits=bits, pack_dtype=torch.int32)
    convert_gptq_v2_to_v1_format_module(module, config)
    packed["qzeros_v1"] = module.qzeros.clone()
    return packed


def by_auto_gptq(values: dict[str, torch.Tensor], g_idx: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    qlinear = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda")
    module = qlinear.QuantLinear(bits, GROUP, COLUMNS, ROWS, bias=False, weight_dtype=torch.float32)
    zeros = torch.full((ROWS, 2), float(1 << bits - 1))
    module.pack(as_linear(values, g_idx, bits), values["scale"].float(), zeros, g_idx)
    return {
        "qweight": module.qweight, "scales": module.scales.half(), "g_idx": module.g_idx,
        "qzeros_v1": module.qzeros,
    }  # fmt: skip


def main(folder: Path) -> None:
    for name in ("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear"):
        package = types.ModuleType(name)  # its own __init__ does not import with transformers 5
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    import gptqmodel

    for bits in (2, 3, 4, 8):
        values = inputs(bits)
        found = {order: by_gptqmodel(values, values[order], bits) for order in ("in_order", "act_order")}
        for order, packed in found.items():
            for name, tensor in by_auto_gptq(values, values[order], bits).items():
                assert torch.equal(tensor, packed[name]), (bits, order, name)
            assert torch.equal(packed["g_idx"], values[order])
        first, second = found.values()
        shared = ("qweight", "scales", "qzeros_v1", "qzeros_v2")
        assert all(torch.equal(first[name], second[name]) for name in shared)
        file = {name: tensor.contiguous() for name, tensor in values.items()}
        file["codes"] = file["codes"].to(torch.uint8)
        file |= {name: first[name].contiguous() for name in shared}
        packers = f"gptqmodel {gptqmodel.__version__}, auto-gptq 0.7.1 (v1)"
        save_file(file, HERE / f"int{bits}.safetensors", {"packers": packers, "group_size": str(GROUP)})
        print(bits, (HERE / f"int{bits}.safetensors").stat().st_size, packers)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
