"""Attention modules of real architectures that cache latent vectors, in latent space on the device: against
their own code in float64, however a text is cut into passes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

pytest.importorskip("triton")

from localmoe.kernels.gpu import latent_attention as kernels
from localmoe.model.cached_pass import cache_name
from localmoe.model.device_cache import DeviceKVCache
from localmoe.model.device_latent import attend_in_latent_space
from localmoe.model.device_linear import KernelMode
from localmoe.model.device_takeover import DEVICE_ATTENTION, Visible, _attention
from localmoe.model.device_window import DeviceWindow
from localmoe.model.uninstall import uninstall

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float16
TOKENS, CAPACITY = 11, 64
LATENT = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
V3 = {
    "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 128, "intermediate_size": 256,
    "num_key_value_heads": 4, "head_dim": 16, "n_group": 1, "topk_group": 1, **LATENT,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {},
    "deepseek_v3": {**V3, "q_lora_rank": 48, "first_k_dense_replace": 1},
}

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def attention_of(architecture: str) -> tuple[Any, Any]:
    """(the first layer's attention, the model's rotary embedding), in 16 bits."""
    changes = {"num_hidden_layers": 1, "hidden_size": 64, **MODELS[architecture]}
    model = tiny_model(architecture, dtype=DTYPE, **changes).to(DEVICE)
    return model.model.layers[0].self_attn, model.model.rotary_emb


def hidden() -> Tensor:
    made = torch.randn(1, TOKENS, 64, generator=torch.Generator().manual_seed(3))
    return made.to(DEVICE, DTYPE)


def exact(module: Any, rotary: Any, x: Tensor) -> Tensor:
    """Its own code in float64, from where the angles are known."""
    angles = rotary(x.float(), torch.arange(TOKENS, device=DEVICE)[None])
    wide = copy.deepcopy(module).double()
    wide.config = copy.deepcopy(module.config)
    wide.config._attn_implementation = "eager"
    seen = torch.full((TOKENS, TOKENS), -torch.inf, dtype=torch.float64, device=DEVICE).triu(1)
    out: Tensor = wide(x.double(), attention_mask=seen[None, None], position_embeddings=angles)[0]
    return out


@pytest.fixture
def in_kernels() -> None:
    ALL_ATTENTION_FUNCTIONS.register(DEVICE_ATTENTION, _attention)


def passes(module: Any, rotary: Any, x: Tensor, widths: list[int], mask: Visible) -> Tensor:
    """The module's output over consecutive passes of `widths` tokens."""
    window = DeviceWindow(CAPACITY, DEVICE)
    cache = DeviceKVCache(1, CAPACITY, window)
    window.visible = CAPACITY
    module.localmoe_window = window
    module.config._attn_implementation = DEVICE_ATTENTION
    parts, at, named = [], 0, {cache_name(type(module).forward): cache}
    for width in widths:
        window.at.fill_(at)
        positions = torch.arange(at, at + width, device=DEVICE)[None]
        with KernelMode():
            some = x[:, at : at + width]
            angles = rotary(some, positions)
            parts.append(module(some, attention_mask=mask, position_embeddings=angles, **named)[0])
        at += width
    return torch.cat(parts, dim=1)


@torch.inference_mode()
@pytest.mark.usefixtures("in_kernels")
@pytest.mark.parametrize("architecture", MODELS)
def test_a_module_attends_in_latent_space_as_its_own_code_does(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, rotary = attention_of(architecture)
    wanted = exact(module, rotary, hidden())
    attend_in_latent_space(module)
    calls: list[int] = []
    split = kernels._Launch.split
    monkeypatch.setattr(
        kernels._Launch, "split", lambda self, slots: (calls.append(slots), split(self, slots))[1]
    )
    monkeypatch.setattr(type(module), "expand_kv", None)  # nothing is expanded
    for widths in ([TOKENS], [4, 1, 6]):
        got = passes(module, rotary, hidden(), widths, Visible(None))
        assert (got.double() - wanted).norm() < 4e-3 * wanted.norm()
        assert len(calls) == len(widths)
        calls.clear()


@torch.inference_mode()
@pytest.mark.usefixtures("in_kernels")
def test_a_window_of_positions_is_left_to_the_module_s_own_keys() -> None:
    module, rotary = attention_of("deepseek_v2")
    plain = passes(module, rotary, hidden(), [TOKENS], Visible(4))
    attend_in_latent_space(module)
    assert torch.equal(passes(module, rotary, hidden(), [TOKENS], Visible(4)), plain)
    uninstall(module)
    assert not {"expand_kv", "localmoe_latent", "localmoe_window"} & set(vars(module))


def broken(module: Any, name: str) -> None:
    """Another form than is known."""
    if name == "order":  # values before keys
        original = module.expand_kv
        module.expand_kv = lambda latent, rope: tuple(part.flip(-1) for part in original(latent, rope))
    elif name == "shape":
        module.expand_kv = lambda latent: (latent, latent)
    elif name == "bias":
        module.kv_b_proj.bias = torch.nn.Parameter(torch.zeros(module.kv_b_proj.out_features, device=DEVICE))
    elif name == "size":
        module.v_head_dim = None
    elif name == "rank":
        module.kv_b_proj = torch.nn.Linear(1024, 4 * 64, bias=False)
        module.kv_lora_rank = 1024


@pytest.mark.parametrize("name", ["order", "shape", "bias", "size", "rank"])
def test_what_is_not_known_keeps_its_own_code(name: str) -> None:
    module, _ = attention_of("deepseek_v2")
    broken(module, name)
    own = module.expand_kv
    attend_in_latent_space(module)
    assert module.expand_kv == own and not hasattr(module, "localmoe_latent")
