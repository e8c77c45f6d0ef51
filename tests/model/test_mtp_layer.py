"""The MTP layer computes what transformers' own does, or, where transformers leaves it out, what its parts
do one after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.mtp_models import BEHIND, BESIDE, mtp_model
from support.tiny_models import RECURRENT_ARCHITECTURE, tiny_config
from torch import Tensor
from transformers import modeling_layers

from localmoe.core.errors import UnsupportedModelError
from localmoe.core.types import ExpertKey
from localmoe.experts.host_store import HostStore
from localmoe.hub.checkpoint import Checkpoint, TensorHeader
from localmoe.hub.mtp_tensors import mtp_tensors
from localmoe.kernels.activations import inner_function
from localmoe.kernels.experts import ExpertWeights, expert_mlp
from localmoe.model.kv_cache import KVCache
from localmoe.model.loader import load_weights
from localmoe.model.mtp_layer import MtpLayer, mtp_skeleton
from localmoe.model.skeleton import build_skeleton, skeleton_from_config
from localmoe.model.takeover import take_over

CPU = torch.device("cpu")
TOKENS = 24


class ExactExperts:
    """A layer's experts with the weights of its records, one pair after another."""

    num_bytes = 0

    def __init__(self, module: Any, store: HostStore) -> None:
        self._inner, self._store = inner_function(module), store

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for token, experts in enumerate(index.tolist()):
            for place, expert in enumerate(experts):
                gate_up, down = self._store.weights(ExpertKey(0, expert))
                weight = ExpertWeights(gate_up, down, None, None, False)
                y = expert_mlp(hidden[token : token + 1], weight, self._inner)
                out[token] += weights[token, place] * y[0]
        return out


def exact_layer(folder: Path) -> tuple[MtpLayer, HostStore]:
    """The layer of a model folder in float32, with its experts unrounded."""
    checkpoint = Checkpoint.open(folder)
    made = mtp_skeleton(build_skeleton(checkpoint, torch.float32), torch.float32)
    tensors = mtp_tensors(checkpoint, made.paths)
    assert tensors is not None
    store = load_weights(made.skeleton, tensors, device=CPU)
    experts: Any = ExactExperts(made.skeleton.experts[0].module, store)
    layer = MtpLayer(made, experts)
    take_over(made.skeleton, [experts], attention=None)
    return layer, store


def target_and_text(folder: Path) -> tuple[Any, Tensor, Tensor]:
    """transformers' model, tokens (T,), and what lies before its head (T, H)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(5, 250, (TOKENS,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        return model, tokens, model.get_decoder()(tokens[None]).last_hidden_state[0]


@pytest.mark.parametrize("architecture", ["glm4_moe", "deepseek_v3"])
def test_it_is_that_of_transformers(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mtp_model(tmp_path / "m", architecture)
    model, tokens, hidden = target_and_text(folder)
    # it knows the layer by the numbers that published models have
    behind = rf"model\.layers\.{int(model.config.num_hidden_layers)}.*"
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [behind])
    theirs = modeling_layers.MtpModel.from_pretrained(model)
    cache = transformers.cache_utils.MtpCache(config=model.config.get_mtp_config())
    layer, store = exact_layer(folder)
    positions = torch.arange(1, TOKENS)
    with store, torch.inference_mode():
        before, following = hidden[None, :-1], tokens[None, 1:]
        wanted = theirs.forward_layer(0, before, positions[None], cache, input_ids=following)
        found = run(layer, model, tokens[1:], hidden[:-1], positions, [TOKENS - 1])
    torch.testing.assert_close(found, wanted[0], rtol=1e-4, atol=1e-4)


def run(
    layer: MtpLayer, model: Any, tokens: Tensor, hidden: Tensor, positions: Tensor, cuts: list[int]
) -> Tensor:
    """In passes that end at these rows."""
    cache, parts, start = KVCache.of_model(layer.text_config, 64, block=1), [], 0
    embedded = model.get_input_embeddings()(tokens)
    for end in cuts:
        here = slice(start, end)
        parts.append(layer.run(embedded[here], hidden[here], positions[here], cache))
        start = end
    return torch.cat(parts)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("glm4_moe_lite", "qwen3_5_moe_text")))
        for name in (*BEHIND, *BESIDE)
    ],
)
def test_it_is_its_parts_one_after_another_however_the_text_is_cut(architecture: str, tmp_path: Path) -> None:
    folder = mtp_model(tmp_path / "m", architecture)
    stored = Checkpoint.open(folder).tensors
    model, tokens, hidden = target_and_text(folder)
    layer, store = exact_layer(folder)
    positions = torch.arange(1, TOKENS)
    # transformers' model of the same kind with that one layer, behind what the layer's parts make by hand
    weights = {name: read(header) for name, header in stored.items()}
    beside = architecture in BESIDE
    names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc") if beside else None
    last = f"model.layers.{int(model.config.num_hidden_layers)}"
    enorm, hnorm, joined = names or (f"{last}.enorm", f"{last}.hnorm", f"{last}.eh_proj")
    with store, torch.inference_mode():
        embedded = model.get_input_embeddings()(tokens[1:])
        epsilon = float(model.config.rms_norm_eps)
        parts = [
            rms_norm(x, weights[f"{name}.weight"] + float(beside), epsilon)
            for x, name in ((embedded, enorm), (hidden[:-1], hnorm))
        ]
        x = torch.cat(parts, dim=-1) @ weights[f"{joined}.weight"].T
        decoder = layer.model.get_decoder()
        wanted = decoder(inputs_embeds=x[None], position_ids=positions[None]).last_hidden_state[0]
        for cuts in ([TOKENS - 1], [1, 2, 9, 10, TOKENS - 1]):
            found = run(layer, model, tokens[1:], hidden[:-1], positions, cuts)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def read(header: TensorHeader) -> Tensor:
    with safe_open(header.file, "pt") as file:
        found: Tensor = file.get_tensor(header.name)
        return found


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def test_its_size_is_that_of_its_tensors(tmp_path: Path) -> None:
    folder = mtp_model(tmp_path / "m", "glm4_moe", tie_word_embeddings=True)
    skeleton = build_skeleton(Checkpoint.open(folder), torch.float32)
    made = mtp_skeleton(skeleton, torch.float32)
    tensors = mtp_tensors(Checkpoint.open(folder), made.paths)
    assert tensors is not None
    others = (".experts.", "e_score_correction_bias")  # the latter a buffer
    routed = sum(
        header.num_bytes for name, header in tensors.tensors.items() if any(map(name.__contains__, others))
    )
    assert 4 * made.shared_params == tensors.total_bytes - routed
    assert made.kv_elements_per_token == 2 * 2 * 32


def test_a_model_whose_layers_all_keep_a_state_has_none_that_fits() -> None:
    config = tiny_config(RECURRENT_ARCHITECTURE, layer_types=["linear_attention"] * 4)
    skeleton = skeleton_from_config(config, torch.float32, "the model")
    with pytest.raises(UnsupportedModelError, match="attends to tokens"):
        mtp_skeleton(skeleton, torch.float32)


def test_experts_may_be_stored_together(tmp_path: Path) -> None:
    folder = mtp_model(tmp_path / "m", "qwen3_5_moe_text")
    alone, store = exact_layer(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    prefix = "mtp.layers.0.mlp.experts."
    parts = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    gate, up, down = (
        torch.stack([parts[f"{prefix}{expert}.{part}_proj.weight"] for expert in range(8)])
        for part in ("gate", "up", "down")
    )
    tensors |= {f"{prefix}gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}down_proj": down}
    save_file(tensors, file, metadata={"format": "pt"})
    together, other = exact_layer(folder)
    with store, other:
        for expert in range(8):
            pairs = zip(*(held.weights(ExpertKey(0, expert)) for held in (store, other)), strict=True)
            assert all(torch.equal(one, same) for one, same in pairs)
    assert together.num_bytes == alone.num_bytes
