"""Do other programs compute with localmoe's drafts what localmoe does? Builds a draft of the embedded model,
merges it with the model's 16-bit rest into a whole GPTQ checkpoint, and loads that with gptqmodel and with
plain transformers in an environment of their own.

    python benchmarks/gptq_interop.py --python GPTQMODEL_VENV/bin/python [--bits 2 3 4 8] [--group-size 128]
    [--json]

The reference is the embedded model with the draft's dequantised experts, in float32. Each line compares the
logits of the same random tokens with it: relative error of the logits, mean KL divergence in nats, share of
equal argmax. "bf16" is that reference itself in bfloat16, so what rounding alone does; "16-bit model" is the
model without a draft, so what the quantisation does. A checkpoint is read rightly where an error is near the
first and far from the second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from localmoe.hub.catalogue import demo_folder
from localmoe.hub.checkpoint import Checkpoint
from localmoe.kernels.codes import BITS, dequantize, quantize_rtn
from localmoe.quant import DraftCheckpoint, DraftProvenance, DraftWriter
from localmoe.quant.expert_names import PROJECTIONS, find_naming

TOKENS = (4, 96)  # sequences and their length

# Each prints nothing that matters, reads argv[1] (the checkpoint) and argv[2] (token ids), writes argv[3]
# (logits).
_GPTQMODEL = """
import sys, torch
from gptqmodel import BACKEND, GPTQModel
from safetensors.torch import load_file, save_file
model = GPTQModel.load(sys.argv[1], device="cpu", backend=BACKEND.TORCH, dtype=torch.DTYPE).model
"""
_TRANSFORMERS = """
import sys, torch, transformers
from safetensors.torch import load_file, save_file
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], device_map="cpu", dtype=torch.bfloat16)
"""
LOADERS = {
    "gptqmodel bf16": _GPTQMODEL.replace("DTYPE", "bfloat16"),
    "gptqmodel fp16": _GPTQMODEL.replace("DTYPE", "float16"),
    "transformers": _TRANSFORMERS,
}
RUN = """
quantised = sum("experts" in name and hasattr(module, "qweight") for name, module in model.named_modules())
with torch.inference_mode():
    logits = model(load_file(sys.argv[2])["ids"]).logits.float()
save_file({"logits": logits.contiguous(), "quantised": torch.tensor(quantised)}, sys.argv[3])
"""


def build_draft(folder: Path, bits: int, group_size: int) -> DraftCheckpoint:
    """A round-to-nearest draft of the embedded model."""
    base = Checkpoint.open(demo_folder())
    naming = find_naming(base.tensors, "weight")
    assert naming is not None
    config = base.config
    provenance = DraftProvenance.now("demo", base.fingerprint(), "rtn", group_size, bits)
    weights = load_file(demo_folder() / "model.safetensors")
    with DraftWriter(folder, config, naming, provenance, 1 << 26) as writer:
        for layer in range(config["num_hidden_layers"]):
            experts = []
            for e in range(config["num_experts"]):
                names = [f"{naming.module(layer, e, projection)}.weight" for projection in PROJECTIONS]
                gate, up, down = (quantize_rtn(weights[name], bits, group_size) for name in names)
                experts.append((gate, up, down))
            writer.add_layer(layer, experts)
        return DraftCheckpoint.open(writer.publish())


def merge(draft: DraftCheckpoint, folder: Path) -> None:
    """A whole checkpoint: the draft's experts, and everything else of the embedded model."""
    folder.mkdir()
    tensors = load_file(demo_folder() / "model.safetensors")
    whole = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for shard in draft.folder.glob("*.safetensors"):
        whole |= load_file(shard)
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "quantize_config.json"):
        shutil.copy(draft.folder / name, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo_folder() / name, folder)


def model_with_draft(draft: DraftCheckpoint | None, dtype: torch.dtype) -> Any:
    """transformers' own model; with a draft, its experts are the draft's dequantised."""
    model = transformers.AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=dtype)
    if draft is not None:
        naming = draft.naming()
        for layer, block in enumerate(model.model.layers):
            experts = block.mlp.experts
            inner = experts.down_proj.shape[2]
            shape = (inner, experts.down_proj.shape[1])
            for e, (gate, up, down) in enumerate(
                draft.reader(naming).layer(layer, experts.num_experts, shape)
            ):
                experts.gate_up_proj.data[e] = torch.cat([dequantize(gate, dtype), dequantize(up, dtype)])
                experts.down_proj.data[e] = dequantize(down, dtype)
    return model


@torch.inference_mode()
def logits_of(draft: DraftCheckpoint | None, dtype: torch.dtype, ids: Tensor) -> Tensor:
    """(sequences, length, V) in float32."""
    logits: Tensor = model_with_draft(draft, dtype)(ids).logits
    return logits.float()


def foreign_logits(python: str, loader: str, checkpoint: Path, work: Path) -> tuple[Tensor, str]:
    """Logits of another program's model, or none and why it gave none."""
    out = work / "logits.safetensors"
    out.unlink(missing_ok=True)
    command = [python, "-c", LOADERS[loader] + RUN, str(checkpoint), str(work / "ids.safetensors"), str(out)]
    environment = {**os.environ, "GPTQMODEL_CPU_WORKERS": "2", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        return torch.empty(0), f"fails: {lines[-1][:160]}"
    found = load_file(out)
    return found["logits"], f"{int(found['quantised'])} quantised expert matrices"


def compare(found: Tensor, reference: Tensor) -> dict[str, float]:
    """Relative error, mean KL divergence (nats) and share of equal argmax."""
    log_p, log_q = reference.log_softmax(-1), found.log_softmax(-1)
    return {
        "relative_error": float((found - reference).norm() / reference.norm()),
        "kl": float((log_p.exp() * (log_p - log_q)).sum(-1).mean()),
        "same_argmax": float((found.argmax(-1) == reference.argmax(-1)).float().mean()),
    }


def measure(bits: int, group_size: int, python: str) -> list[dict[str, Any]]:
    """One row a program."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        draft = build_draft(work / "draft", bits, group_size)
        merge(draft, work / "whole")
        ids = torch.randint(3, 4096, TOKENS, generator=torch.Generator().manual_seed(0))
        save_file({"ids": ids}, work / "ids.safetensors")
        reference = logits_of(draft, torch.float32, ids)
        rows: list[dict[str, Any]] = [
            {"who": "bf16", **compare(logits_of(draft, torch.bfloat16, ids), reference)},
            {"who": "fp16", **compare(logits_of(draft, torch.float16, ids), reference)},
            {"who": "16-bit model", **compare(logits_of(None, torch.float32, ids), reference)},
        ]
        for loader in LOADERS:
            found, note = foreign_logits(python, loader, work / "whole", work)
            figures = compare(found, reference) if found.numel() else {}
            rows.append({"who": loader, "note": note, **figures})
        return [{"bits": bits, "group_size": group_size, **row} for row in rows]


def main() -> None:
    """Print a line a program, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", required=True, help="of an environment with gptqmodel")
    parser.add_argument("--bits", type=int, nargs="+", default=list(BITS), choices=BITS)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    rows = [row for bits in options.bits for row in measure(bits, options.group_size, options.python)]
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    print(f"{'bits':>4} {'program':<16} {'rel. error':>10} {'KL':>9} {'argmax':>7}  note")
    for row in rows:
        figures = "".rjust(28)
        if "kl" in row:
            figures = f"{row['relative_error']:>10.5f} {row['kl']:>9.2e} {row['same_argmax']:>7.3f}"
        print(f"{row['bits']:>4} {row['who']:<16} {figures}  {row.get('note', '')}")


if __name__ == "__main__":
    main()
