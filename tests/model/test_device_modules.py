"""Fused modules of real architectures against the modules that they replace; what is not known keeps its
own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.test_more_architectures import ANSWERING
from support.tiny_models import (
    BOUNDED_ARCHITECTURE,
    CHANNEL_ARCHITECTURE,
    STATEFUL_ARCHITECTURES,
    UNGATED_ARCHITECTURE,
    tiny_config,
    tiny_model,
)
from torch import Tensor, nn
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRouter
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

pytest.importorskip("triton")

from localmoe.kernels.gpu.norm import rms_norm
from localmoe.kernels.packed_weight import PackedWeight
from localmoe.model.device_linear import KernelMode
from localmoe.model.device_modules import install
from localmoe.model.rotary import tabulate, trained_context

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float16
CONTEXT, TOKENS = 64, 6
BY_CHANNEL = (CHANNEL_ARCHITECTURE, BOUNDED_ARCHITECTURE)
TWO_LAYERS = (
    "deepseek_v2",
    "deepseek_v3",
    "lfm2_moe",
    "granitemoehybrid",
    "gemma4_text",
    *BY_CHANNEL,
)  # or all would have no experts, or be alike
NORMS = {"input_layernorm", "post_attention_layernorm", "norm"}
REPLACED = {
    "qwen2_moe": NORMS | {"layers.0", "self_attn", "gate", "shared_expert", "mlp", "rotary_emb"},
    "qwen3_moe": NORMS | {"layers.0", "self_attn", "q_norm", "k_norm", "gate", "rotary_emb"},
    "mixtral": NORMS | {"layers.0", "self_attn", "gate", "rotary_emb"},
    "olmoe": NORMS | {"layers.0", "self_attn", "q_norm", "k_norm", "gate", "rotary_emb"},
    "deepseek_v2": NORMS
    | {"layers.0", "layers.1", "self_attn", "kv_a_layernorm", "gate", "mlp", "shared_experts"}
    | {"rotary_emb"},
    "deepseek_v3": NORMS  # turns neighbours, and puts them in halves
    | {"layers.0", "layers.1", "self_attn", "q_a_layernorm", "kv_a_layernorm", "gate", "mlp"}
    | {"shared_experts", "rotary_emb"},
    "gpt_oss": NORMS | {"layers.0", "router", "rotary_emb"},
    "phimoe": {"self_attn", "rotary_emb"},
    "lfm2_moe": {"layers.0", "layers.1", "operator_norm", "ffn_norm", "embedding_norm", "feed_forward"}
    | {"gate", "self_attn", "q_layernorm", "k_layernorm", "pos_emb"},
    "granitemoehybrid": NORMS | {"layers.0", "layers.1", "router", "self_attn", "shared_mlp"},
    UNGATED_ARCHITECTURE: {"norm", "norm_f", "gate", "shared_experts", "mixer"},
    "gemma4_text": NORMS
    | {"layers.0", "layers.1", "self_attn", "q_norm", "k_norm", "v_norm", "mlp", "router", "rotary_emb"}
    | {f"{place}_feedforward_layernorm{number}" for place in ("pre", "post") for number in ("", "_2")}
    | {"post_feedforward_layernorm_1"},
    CHANNEL_ARCHITECTURE: NORMS | {"layers.0", "layers.1", "kv_a_layernorm", "gate", "mlp", "shared_experts"},
    BOUNDED_ARCHITECTURE: NORMS
    | {"layers.0", "layers.1", "self_attn", "kv_a_layernorm", "gate", "mlp", "shared_experts", "rotary_emb"},
    # rotates in 32 bits, by its own code
    "flex_olmo": NORMS - {"input_layernorm"}
    | {"post_feedforward_layernorm", "self_attn", "q_norm", "k_norm", "gate", "rotary_emb"},
}
Call = tuple[tuple[Any, ...], dict[str, Any], Any]

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def tiny(architecture: str) -> Any:
    layers = 1 if architecture not in TWO_LAYERS else 2
    changes: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": 64, "vocab_size": 48}
    if architecture == "gpt_oss":
        changes["layer_types"] = ["sliding_attention"]
    if architecture == "deepseek_v3":
        changes |= ANSWERING[architecture]
    if architecture == "lfm2_moe":
        changes["layer_types"] = ["conv", "full_attention"]
    if architecture == "gemma4_text":
        changes |= {**ANSWERING[architecture], "layer_types": ["sliding_attention", "full_attention"]}
    if architecture == "granitemoehybrid":
        changes |= {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 4}
        changes["residual_multiplier"] = 0.22
    if architecture in BY_CHANNEL:
        changes["layer_types"] = ["linear_attention", "full_attention"]
        changes["mlp_layer_types"] = ["dense", "sparse"]
    if architecture == UNGATED_ARCHITECTURE:
        changes["layers_block_type"] = ["moe", "full_attention"]
    return tiny_model(architecture, dtype=DTYPE, **changes).to(DEVICE)


def calls_of(model: Any, ids: Tensor) -> tuple[dict[str, Call], Tensor]:
    """What every module was given and returned in one pass, and the logits."""
    calls: dict[str, Call] = {}
    hooks = [
        module.register_forward_hook(
            lambda module, args, kwargs, out, path=path: calls.__setitem__(path, (args, kwargs, out)),
            with_kwargs=True,
        )
        for path, module in model.named_modules()
    ]
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return calls, logits


def assert_alike(got: Any, wanted: Any, path: str) -> None:
    if isinstance(wanted, tuple):
        assert isinstance(got, tuple) and len(got) == len(wanted), path
        for mine, theirs in zip(got, wanted, strict=True):
            assert_alike(mine, theirs, path)
    elif wanted is None or not isinstance(wanted, Tensor):
        assert got is wanted or got == wanted, path
    elif wanted.dtype == torch.int64:
        assert torch.equal(got, wanted), path
    else:
        assert got.shape == wanted.shape and got.dtype == wanted.dtype, path
        kind = torch.complex128 if wanted.is_complex() else torch.float64
        error = (got.to(kind) - wanted.to(kind)).norm() / wanted.to(kind).norm().clamp_min(1e-6)
        assert error < 4e-3, f"{path}: off by {error}"


def by_expert(logits: Tensor, weights: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a router returns, in either order, a token's experts in ascending order: theirs does not
    matter."""
    if logits.dtype == torch.int64:
        logits, index = index, logits
    experts, order = index.sort(dim=-1)
    return logits, weights.gather(-1, order), experts


def replaced_in(model: Any) -> list[str]:
    return [path for path, module in model.named_modules() if "forward" in vars(module)]


def last_name(path: str) -> str:
    parts = path.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]


@torch.inference_mode()
@pytest.mark.parametrize(
    "architecture", [name for name in REPLACED if name not in BY_CHANNEL or name in STATEFUL_ARCHITECTURES]
)
@pytest.mark.slow(but=6)
def test_what_is_replaced_computes_what_it_did_before(architecture: str) -> None:
    model = tiny(architecture)
    ids = torch.randint(6, 48, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    calls, logits = calls_of(model, ids)
    mode = install(model, CONTEXT)
    assert not mode.others
    replaced = replaced_in(model)
    assert {last_name(path) for path in replaced} == REPLACED[architecture]
    modules = dict(model.named_modules())
    with mode:
        for path in replaced:
            args, kwargs, wanted = calls[path]
            got = modules[path](*args, **kwargs)
            if path.endswith(("gate", "router")):
                got, wanted = by_expert(*got), by_expert(*wanted)
            assert_alike(got, wanted, path)
        assert_alike(model(input_ids=ids, use_cache=False).logits, logits, "the whole model")


@torch.inference_mode()
def test_one_row_of_a_draft_is_nearly_the_same() -> None:
    model = tiny("qwen2_moe")
    logits = calls_of(model, torch.tensor([[9]], device=DEVICE))[1]
    mode = install(model, CONTEXT)
    mode.one_row = True
    with mode:
        assert_alike(model(input_ids=torch.tensor([[9]], device=DEVICE), use_cache=False).logits, logits, "")


@torch.inference_mode()
@pytest.mark.parametrize(
    "architecture",
    ["qwen2_moe", "qwen3_moe", *(name for name in BY_CHANNEL if name in STATEFUL_ARCHITECTURES)],
)
def test_no_weight_is_held_twice(architecture: str) -> None:
    model = tiny(architecture)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    mode = install(model, CONTEXT)
    tensors = [*model.parameters(), *mode.joined, *(group.weight for group, _ in mode._fused.values())]
    tensors += [group.bias for group, _ in mode._fused.values() if group.bias is not None]
    for module in model.modules():  # and what the functions in place of a forward hold on to
        cells = getattr(vars(module).get("forward"), "__closure__", None) or ()
        tensors += [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert sum(storages.values()) == sum(tensor.nbytes for tensor in before.values())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v2", "gpt_oss", "qwen3_5_moe_text"])
def test_the_rotary_embedding_is_right_at_every_position(architecture: str) -> None:
    model = tiny(architecture)
    x = torch.zeros(1, 3, 64, dtype=DTYPE, device=DEVICE)
    positions = [torch.tensor([chosen], device=DEVICE) for chosen in ([0, 1, 2], [CONTEXT - 1, 7, 30])]
    if architecture == "qwen3_5_moe_text":  # a place has three coordinates, which are one in a text
        positions = [ids.expand(3, 1, -1) for ids in positions]
    wanted = [model.model.rotary_emb(x, position_ids=ids) for ids in positions]
    install(model, CONTEXT)
    for ids, expected in zip(positions, wanted, strict=True):
        got = model.model.rotary_emb(x, position_ids=ids)
        pairs = zip(got, expected, strict=True) if isinstance(expected, tuple) else [(got, expected)]
        for mine, theirs in pairs:  # a GPU computes sine and cosine otherwise than the table was made
            torch.testing.assert_close(
                mine, theirs, **({} if DEVICE.type == "cuda" else {"rtol": 0, "atol": 0})
            )


class LikeGemmaRMSNorm(nn.Module):
    """Multiplies with 1 + weight before it rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.randn(32) * 0.3), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (scaled * (1.0 + self.weight.float())).type_as(x)


class MaxRMSNorm(LikeGemmaRMSNorm):
    """Bears the name and is none."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().amax(-1, keepdim=True) + self.eps) * self.weight


class OddRouter(nn.Module):
    """Of a usual form, but for what it does with the weights; or with more than the kernel can choose."""

    def __init__(self, experts: int, top_k: int, power: float) -> None:
        super().__init__()
        self.weight, self.top_k, self.power = nn.Parameter(torch.randn(experts, 32)), top_k, power

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.weight.T
        weights, index = logits.float().softmax(-1).topk(self.top_k)
        return logits, weights**self.power, index


class SharesRouter(OddRouter):
    """Sigmoids of the chosen, as shares of their sum, times `power`."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.weight.T
        weights, index = logits.float().sigmoid().topk(self.top_k)
        return logits, weights / weights.sum(-1, keepdim=True) * self.routed_scaling_factor, index

    @property
    def routed_scaling_factor(self) -> float:
        return self.power


class ChoosingRouter(OddRouter):
    """Sigmoids, of which others than the largest may be chosen, and only so many of the first ones."""

    def __init__(self, experts: int, top_k: int, within: int) -> None:
        super().__init__(experts, top_k, 1.0)
        self.within = within
        self.register_buffer("e_score_correction_bias", torch.randn(experts, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.weight.T
        scores = logits.float().sigmoid()
        wanted = (scores + self.e_score_correction_bias)[:, : self.within]
        index = wanted.topk(self.top_k).indices
        return logits, scores.gather(1, index) * 2.5, index

    routed_scaling_factor = 2.5


class GivenRouter(OddRouter):
    """The same, given what to add."""

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        logits = x @ self.weight.T
        scores = logits.sigmoid()
        index = (scores if expert_bias is None else scores + expert_bias).topk(self.top_k).indices
        return logits, scores.gather(1, index), index


class GatedMLP(nn.Module):
    """Of the usual form."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(32, 48, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(48, 32, bias=False), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs neighbours instead of halves."""

    def turn(x: Tensor) -> Tensor:
        other = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
        return x * cos[:, None] + other * sin[:, None]

    return turn(q), turn(k)


class PairedAttention(nn.Module):
    """Rotates neighbours, and has a bias in one projection only."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 16
        self.q_proj, self.k_proj = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        self.v_proj = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part(x).view(1, -1, 2, 16).mT.mT for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q + k + v.transpose(1, 2)


class Several(nn.Module):
    """Modules to be looked at."""

    dtype = DTYPE

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


@torch.inference_mode()
def test_what_only_looks_like_a_known_module_keeps_its_own_code() -> None:
    torch.manual_seed(0)
    model = Several(
        max_norm=MaxRMSNorm(),
        layer_norm=nn.LayerNorm(32),
        squares=OddRouter(8, 2, 2.0),
        many=OddRouter(40, 17, 1.0),
        few=ChoosingRouter(8, 2, within=7),
        tanh=GatedMLP(nn.Tanh()),
        attention=PairedAttention(),
    ).to(DEVICE, DTYPE)
    mode = install(model, CONTEXT)
    assert replaced_in(model) == []
    assert mode._fused == {} and mode.others, "rows of its norm may depend on each other"
    x = torch.randn(1, 3, 32).to(DEVICE, DTYPE)
    cos, sin = (torch.randn(1, 3, 16).to(DEVICE, DTYPE) for _ in range(2))
    attention = model.attention
    wanted = attention(x, cos, sin)
    with mode:
        assert_alike(attention(x, cos, sin), wanted, "biases of some projections")


@torch.inference_mode()
def test_a_known_module_in_another_guise_is_recognised_by_what_it_computes() -> None:
    torch.manual_seed(0)
    model = Several(
        norm=LikeGemmaRMSNorm(),
        router=OddRouter(8, 2, 1.0),
        shares=SharesRouter(8, 3, 2.5),
        choosing=ChoosingRouter(8, 3, within=8),
        mlp=GatedMLP(nn.SiLU()),
        gelu=GatedMLP(nn.GELU()),
        gelu_tanh=GatedMLP(nn.GELU("tanh")),
        relu=GatedMLP(nn.ReLU()),
    ).to(DEVICE, DTYPE)
    x = torch.randn(4, 32).to(DEVICE, DTYPE)
    wanted = {name: module(x) for name, module in model.named_children()}
    mode = install(model, CONTEXT)
    assert replaced_in(model) == [
        "norm", "router", "shares", "choosing", "mlp", "gelu", "gelu_tanh", "relu"
    ]  # fmt: skip
    with mode:
        for name, module in model.named_children():
            assert_alike(module(x), wanted[name], name)


@torch.inference_mode()
def test_a_router_that_is_given_what_to_add_for_the_choice() -> None:
    torch.manual_seed(0)
    model = Several(given=GivenRouter(8, 3, 1.0)).to(DEVICE, DTYPE)
    x, bias = torch.randn(6, 32).to(DEVICE, DTYPE), torch.randn(8, dtype=torch.float32).to(DEVICE)
    wanted = model.given(x, bias), model.given(x)
    mode = install(model, CONTEXT)
    assert replaced_in(model) == ["given"]
    with mode:
        assert_alike(by_expert(*model.given(x, bias)), by_expert(*wanted[0]), "given")
        assert_alike(by_expert(*model.given(x)), by_expert(*wanted[1]), "not given")


def test_outside_the_mode_and_in_other_dtypes_pytorch_multiplies() -> None:
    layer = nn.Linear(8, 4)
    x = torch.randn(2, 8)
    wanted = layer(x)
    with KernelMode():
        assert torch.equal(layer(x), wanted)


@pytest.mark.parametrize(("context", "same"), [(64, True), (65, False)])
def test_angles_up_to_the_original_length_are_those_that_transformers_gives_a_short_text(
    context: int, same: bool
) -> None:
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16, "short_mscale": 1.1, "long_mscale": 1.2}
    config = tiny_config("phimoe", max_position_embeddings=256, rope_parameters={**scaling, **factors})
    rotary = PhimoeRotaryEmbedding(config)
    x, positions = torch.empty(1, 9, 4, 32, dtype=torch.float32), torch.arange(40, 49)[None]
    wanted = rotary(x, positions)
    assert trained_context(nn.ModuleList([rotary])) == 64
    tabulate(rotary, context, torch.float32)
    for mine, theirs in zip(rotary(x, positions), wanted, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6) == same


@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_multiplies_with_the_same_weights(bias: bool) -> None:
    """By another kernel in the draft, and not at all once its model is closed."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"norm": nn.LayerNorm(2048), "head": nn.Linear(2048, 40, bias=bias)})
    model.to(DEVICE, torch.bfloat16)
    head = model["head"]
    packed = PackedWeight.empty(40, 2048, DEVICE)
    packed.put(0, head.weight.cpu())
    x = torch.randn(1, 3, 2048).to(DEVICE, torch.bfloat16)
    wanted = head(x).double()
    head.weight = nn.Parameter(head.weight.to("meta"), requires_grad=False)
    head.register_buffer("localmoe_packed", packed.memory, persistent=False)
    mode = install(model, CONTEXT)
    with mode:
        whole, one = head(x), head(x[:, :1])
        mode.one_row = True
        several, other = head(x), head(x[:, :1])
    assert whole.shape == (1, 3, 40) and torch.equal(several, whole) and not mode.others
    for found, rows in ((whole, slice(None)), (one, slice(1)), (other, slice(1))):
        torch.testing.assert_close(found.double(), wanted[:, rows], rtol=2e-2, atol=2e-2)
    if DEVICE.type == "cuda":
        assert torch.equal(one, whole[:, :1])
    model.to("meta")
    assert head.localmoe_packed.is_meta


@torch.inference_mode()
def test_a_router_that_scales_what_it_chose_keeps_to_its_own_scales() -> None:
    """Which the tiny model has not all as ones."""
    model = tiny("gemma4_text")
    router = model.model.layers[0].router
    generator = torch.Generator().manual_seed(3)
    for parameter in (router.scale, router.per_expert_scale):
        parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
    x = torch.randn(9, 64, generator=generator).to(DEVICE, DTYPE)
    shares, weights, index = router(x)
    install(model, CONTEXT)
    assert "forward" in vars(router)
    got = router(x)
    assert_alike(by_expert(*got), by_expert(shares, weights, index), "router")
    normed = rms_norm(x, router.scale, router.norm.eps, factor=router.scalar_root_size)
    chosen = router.localmoe_choose(normed)
    assert torch.equal(chosen[0], got[1]) and torch.equal(chosen[1], got[2])


class LinearGate(nn.Module):
    """As Hunyuan's: all of it is a linear layer in 32 bits."""

    def __init__(self, *, bias: bool) -> None:
        super().__init__()
        self.wg, self.top_k = nn.Linear(32, 8, bias=bias), 3

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.wg(x.float())
        weights, index = logits.softmax(-1).topk(self.top_k)
        return logits, weights / weights.sum(-1, keepdim=True), index


@torch.inference_mode()
@pytest.mark.parametrize("bias", [False, True])
def test_a_gate_that_is_one_linear_layer(bias: bool) -> None:
    torch.manual_seed(0)
    model = Several(gate=LinearGate(bias=bias)).to(DEVICE)
    x = torch.randn(9, 32).to(DEVICE, DTYPE)
    wanted = model.gate(x)
    mode = install(model, CONTEXT)
    assert replaced_in(model) == ([] if bias else ["gate"])
    with mode:
        assert_alike(by_expert(*model.gate(x)), by_expert(*wanted), "gate")
        assert mode.others == bias, "PyTorch multiplies in 32 bits"


class OwnRouter(Gemma4TextRouter):
    """Names other things than Gemma 4's."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(hidden_states)


@torch.inference_mode()
def test_a_sandwich_whose_router_has_no_kernel_keeps_its_own_code() -> None:
    model = tiny("gemma4_text")
    ids = torch.randint(6, 48, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    wanted = model(input_ids=ids, use_cache=False).logits
    first, second = model.model.layers
    first.router.__class__ = OwnRouter
    mode = install(model, CONTEXT)
    assert [("forward" in vars(part)) for part in (first.router, first, second.router, second)] == [
        False, False, True, True
    ]  # fmt: skip
    with mode:
        assert_alike(model(input_ids=ids, use_cache=False).logits, wanted, "the whole model")
