"""Compiles what the dense launchers would launch, for GPUs that are not there; prints a JSON line a kernel.

    python compile_launches.py CAPABILITY=LAUNCH,...      e.g. 80=few,split 89=prompt

Runs without TRITON_INTERPRET. Launchers get CPU tensors of real shapes whose memory is never touched; a
launch is turned into a compilation with the arguments' types, alignments and constants.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from localmoe.experts.records import RecordLayout
from localmoe.experts.rest_block import RestBlock
from localmoe.experts.stage_block import StageBlock
from localmoe.kernels.activations import Activation
from localmoe.kernels.choices import ChoiceView
from localmoe.kernels.gpu import attention as attention_module
from localmoe.kernels.gpu import linear as linear_module
from localmoe.kernels.gpu import packed_linear as packed_module
from localmoe.kernels.gpu import routed_experts as routed_module
from localmoe.kernels.gpu.add import add
from localmoe.kernels.gpu.attention import attention
from localmoe.kernels.gpu.choices import choose_tokens
from localmoe.kernels.gpu.copy_ahead import copy_ahead
from localmoe.kernels.gpu.copy_rest import copy_rest
from localmoe.kernels.gpu.embedding import read_rows
from localmoe.kernels.gpu.foretelling import foretell
from localmoe.kernels.gpu.gated_norms import gated_norm, group_norm
from localmoe.kernels.gpu.grouping import Groups, group_pairs
from localmoe.kernels.gpu.lane_kernels import post_job
from localmoe.kernels.gpu.latent_attention import latent_attention
from localmoe.kernels.gpu.linear import gemv, gemv_gated, linear, linear_gated
from localmoe.kernels.gpu.norm import rms_norm
from localmoe.kernels.gpu.packed_linear import packed_linear, packed_row
from localmoe.kernels.gpu.packed_rows import packed_rows
from localmoe.kernels.gpu.rope import apply_rope, write_kv
from localmoe.kernels.gpu.routed_experts import ExpertShape, combine, routed_experts, run_groups
from localmoe.kernels.gpu.router import route
from localmoe.kernels.gpu.sandwich import enter_feed_forward, leave_feed_forward
from localmoe.kernels.gpu.scan import scan
from localmoe.kernels.gpu.scan_inputs import Projected, ScanWeights, scan_inputs
from localmoe.kernels.gpu.short_conv import short_conv
from localmoe.kernels.gpu.state_memory import StateMemory
from localmoe.kernels.gpu.state_places import DRAFT, PROMPT, WINDOW, begin_pass
from localmoe.kernels.lanes import LaneView
from localmoe.kernels.mailbox import MailboxLayout
from localmoe.kernels.packed_weight import PackedWeight
from localmoe.kernels.recurrent_shapes import ConvShape, ScanShape
from localmoe.kernels.residency import ResidencyView
from localmoe.kernels.stage import StageView
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model.device_experts import STREAM_ROWS, STREAM_SHARE

TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
    torch.float64: "fp64", torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
OPTIONS = ("launch_pdl", "num_warps", "num_stages", "enable_fp_fusion")


def signature_of(
    kernel: JITFunction, values: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any], dict[Any, Any]]:
    """(type of each argument, constants, alignments) as a launch with these values specialises them."""
    types: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: dict[Any, Any] = {}
    for i, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        specialised = not parameter.do_not_specialize
        types[parameter.name] = "constexpr"
        if parameter.is_constexpr or value is None or (specialised and type(value) is int and value == 1):
            constants[parameter.name] = value
        elif isinstance(value, Tensor):
            types[parameter.name] = f"*{TYPES[value.dtype]}"
            aligned[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            types[parameter.name] = "fp32"
        else:
            types[parameter.name] = "i32" if abs(value) < 1 << 31 else "i64"
            if specialised and value % 16 == 0:
                aligned[(i,)] = [["tt.divisibility", 16]]
    return types, constants, aligned


def compile_instead(target: GPUTarget) -> Callable[..., None]:
    """A stand-in for JITFunction.run that compiles for `target` and prints what came of it."""

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if int(target.arch) >= 90 and "DEPENDENT" in options:
            options |= {"DEPENDENT": True, "launch_pdl": True}
        values = dict(zip((p.name for p in kernel.params), args, strict=False)) | options
        types, constants, aligned = signature_of(kernel, values)
        compiled = triton.compile(
            ASTSource(kernel, types, constants, aligned),
            target=target,
            options={name: options[name] for name in OPTIONS if name in options},
        )
        ptx = compiled.asm["ptx"]
        report = {
            "capability": target.arch,
            "kernel": kernel.__name__,
            "shared": compiled.metadata.shared,
            "mma": "mma.sync.aligned.m16n8k16" in ptx,
            "other_mma": any(name in ptx for name in ("wgmma", "tcgen05", "m16n8k8")),
            "fused": "fma.rn.f32" in ptx,
            "wide": types.get("weight") == "*fp32",
            "async": "cp.async" in ptx,
            "waits": "griddepcontrol.wait" in ptx,
            "16_bytes": ptx.count("ld.global.v4"),
            "launch": {name: value for name, value in values.items() if isinstance(value, int | str | float)},
        }
        print(json.dumps(report), flush=True)

    return run


def weights(columns: int, depth: int) -> tuple[Tensor, Tensor]:
    return torch.empty(1024, depth, dtype=torch.bfloat16), torch.empty(columns, depth, dtype=torch.bfloat16)


SIZES = ((2048, 2048), (151_936, 2048), (2048, 5632))


def products(rows: int, sizes: Sequence[tuple[int, int]] = SIZES) -> None:
    for columns, depth in sizes:
        x, weight = weights(columns, depth)
        linear(x[:rows], weight, residual=torch.empty(rows, columns, dtype=x.dtype))
    x, weight = weights(2 * 5632, 2048)
    linear_gated(x[:rows], weight)


ROW_SIZES = ((6144, 2048), (2048, 5632), (60, 2880))


def one_row(sizes: Sequence[tuple[int, int]] = ROW_SIZES) -> None:
    for columns, depth in sizes:
        x, weight = weights(columns, depth)
        gemv(x[:1], weight, torch.empty(columns, dtype=x.dtype))
    gemv_gated(*(t[:n] for t, n in zip(weights(11_264, 2048), (1, 11_264), strict=True)))


def packed() -> None:
    for columns, depth in ((151_936, 2048), (201_088, 2880)):
        x, bias = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((33, depth), (columns,)))
        weight = PackedWeight.stand_in(columns, depth, torch.device("cpu"))
        packed_linear(x, weight, bias)
        packed_linear(x[:9], weight)
        packed_row(x[:1], weight, bias)
        packed_rows(torch.empty(9, dtype=torch.int64), weight)


def rows() -> None:
    x = torch.empty(9, 2048, dtype=torch.bfloat16)
    rms_norm(x, x[0], 1e-6)
    add(x, x)
    rms_norm(x.view(1, 9, 16, 128), x[0, :128], 1e-6)
    rms_norm(x, x[0], 1e-6, x, weight_offset=1.0)
    enter_feed_forward(x, x, x[0], (x[0], x[0], x[0]), 1e-6, 0.5)
    leave_feed_forward(x, x, x, (x[0], x[0], x[0]), 1e-6, x[0, :1])
    heads = x.view(1, 9, 16, 128).transpose(1, 2)
    turns = torch.empty(1, 9, 64, dtype=torch.bfloat16)
    apply_rope(heads, heads, turns, turns)
    apply_rope(heads, heads, turns, turns, "pairs to halves")
    apply_rope(heads, heads, turns.float(), turns.float(), "pairs")
    cache = torch.empty(1, 16, 4096, 128, dtype=torch.bfloat16)
    write_kv(heads, heads, cache, cache, torch.empty(1, dtype=torch.int64))
    read_rows(torch.empty(9, dtype=torch.int64), 1 << 44, 151_936, 2048, x.dtype)


HEADS = ((16, 16, 128, 128), (32, 4, 64, 64), (16, 16, 192, 128), (8, 4, 256, 256), (16, 2, 512, 512))


def attend(rows: int, kinds: Sequence[tuple[int, int, int, int]] = HEADS) -> None:
    start = torch.empty(1, dtype=torch.int64)
    for heads, kv_heads, dim, value_dim in kinds:
        query = torch.empty(1, heads, rows, dim, dtype=torch.bfloat16)
        key = torch.empty(1, kv_heads, 4096, dim, dtype=torch.bfloat16)
        value = torch.empty(1, kv_heads, 4096, value_dim, dtype=torch.bfloat16)
        rare = dim == 64
        attention(
            query, key, value, start, scale=0.1, max_length=4096,
            window=128 if rare else None, softcap=30.0 if rare else None,
            sinks=torch.empty(heads, dtype=torch.bfloat16) if rare else None,
        )  # fmt: skip


def sections() -> None:
    by_chunks = attention_module.CHUNK_PARTIAL_BYTES
    attention_module.CHUNK_PARTIAL_BYTES = 0
    attend(9, HEADS[:1])
    attention_module.CHUNK_PARTIAL_BYTES = by_chunks


def latent(rows: int) -> None:
    """DeepSeek-V2-Lite's attention."""
    query = torch.empty(1, 16, rows, 192, dtype=torch.bfloat16)
    caches = [torch.empty(1, 1, 4096, dim, dtype=torch.bfloat16) for dim in (512, 64)]
    weight = torch.empty(16, 256, 512, dtype=torch.bfloat16)
    start = torch.empty(1, dtype=torch.int64)
    latent_attention(query, *caches, weight[:, :128], weight[:, 128:], start, scale=0.1, max_length=4096)


def delta() -> None:
    """Linear attention of Qwen3.5-35B-A3B: windows, prompts and drafts."""
    shape, dtype, device = ScanShape(16, 32, 128, 128, 4), torch.bfloat16, torch.device("cpu")
    joined = torch.empty(72, shape.channels + 4096 + 64, dtype=dtype)
    x, gate, b, a = joined.split((shape.channels, 4096, 32, 32), dim=1)
    projected = Projected(x, a, b, (0, 128), (2048, 128), (4096, 256), 2)
    memory = StateMemory.empty(shape, 2, 72, dtype, device).of_layer(1)
    taps, heads = torch.empty(shape.channels, 4, dtype=dtype), torch.empty(32, dtype=dtype)
    weight = ScanWeights(taps, None, (0, 2048, 4096), heads, heads)
    places = torch.empty(9, dtype=torch.int64)
    for kind in (WINDOW, PROMPT, DRAFT):
        rows = 1 if kind == DRAFT else 72
        begin_pass(places, places[:1], places[:1], kind, 72)
        part = replace(projected, x=x[:rows], a=a[:rows], b=b[:rows])
        inputs = scan_inputs(part, weight, shape, memory, places, kind)
        out = scan(inputs, None, shape, memory, places, places[:1], rows, kind)
    gated_norm(out, gate, (0, 256), 2, torch.empty(128, dtype=dtype), 1e-6)


def channel_delta() -> None:
    """Linear attention of Kimi-Linear-48B-A3B: windows, prompts and drafts."""
    shape, dtype = ScanShape(32, 32, 128, 128, 4, by_channel=True), torch.bfloat16
    x, wide = torch.empty(72, shape.channels, dtype=dtype), torch.empty(72, 4096, dtype=dtype)
    b = torch.empty(72, 4096 + 32, dtype=dtype)[:, 4096:]
    memory = StateMemory.empty(shape, 2, 72, dtype, torch.device("cpu")).of_layer(1)
    taps, rates = torch.empty(shape.channels, 4, dtype=dtype), torch.empty(4096)
    begins = 0, 4096, 8192
    weight = ScanWeights(taps, None, begins, rates[:32], rates)
    places = torch.empty(9, dtype=torch.int64)
    for kind in (WINDOW, PROMPT, DRAFT):
        rows = 1 if kind == DRAFT else 72
        part = Projected(x[:rows], wide[:rows], b[:rows], *((at, 128) for at in begins), 1)
        inputs = scan_inputs(part, weight, shape, memory, places, kind)
        out = scan(inputs, None, shape, memory, places, places[:1], rows, kind)
    gated_norm(out, wide, (0, 128), 1, torch.empty(128, dtype=dtype), 1e-5, sigmoid=True)


def state_space() -> None:
    """Of Nemotron 3 Nano, and Granite 4.0 H Small's norm."""
    shape, dtype, device = ScanShape(8, 64, 128, 64, 4, "sum"), torch.bfloat16, torch.device("cpu")
    joined = torch.empty(72, 4096 + shape.channels + 64, dtype=dtype)
    gate, x, dt = joined.split((4096, shape.channels, 64), dim=1)
    projected = Projected(x, dt, None, (4096 + 1024, 128), (4096, 128), (0, 512), 8)
    memory = StateMemory.empty(shape, 2, 72, dtype, device).of_layer(1)
    taps, heads = torch.empty(shape.channels, 4, dtype=dtype), torch.empty(64, dtype=dtype)
    weight = ScanWeights(taps, taps[:, 0], (5120, 4096, 0), heads, heads, (0.001, float("inf")))
    places = torch.empty(9, dtype=torch.int64)
    for kind in (WINDOW, PROMPT, DRAFT):
        rows = 1 if kind == DRAFT else 72
        part = replace(projected, x=x[:rows], a=dt[:rows])
        inputs = scan_inputs(part, weight, shape, memory, places, kind)
        out = scan(inputs, heads, shape, memory, places, places[:1], rows, kind)
    group_norm(out.flatten(1), gate[:1], torch.empty(4096, dtype=dtype), 8, 1e-5)
    wide = torch.empty(8, 8192, dtype=dtype)
    group_norm(wide, wide, wide[0], 1, 1e-5)


def convolution() -> None:
    """Of LFM2-8B-A1B."""
    shape, dtype = ConvShape(2048, 3), torch.bfloat16
    projected, taps = torch.empty(72, 6144, dtype=dtype), torch.empty(2048, 3, dtype=dtype)
    memory = StateMemory.empty(shape, 2, 72, dtype, torch.device("cpu")).of_layer(1)
    places = torch.empty(9, dtype=torch.int64)
    for kind in (WINDOW, PROMPT, DRAFT):
        rows = 1 if kind == DRAFT else 72
        short_conv(projected[:rows], taps, None, shape, memory, places, places[:1], kind)


def route_widely() -> None:
    """With weights and logits in 32 bits."""
    x, weight = weights(64, 2048)
    route(x[:9], weight.float(), 6, score="softmax", renormalise=False, logits_dtype=torch.float32)


def router(sizes: Sequence[int] = (60, 128)) -> None:
    for experts in sizes:
        x, weight = weights(experts, 2048)
        route(x[:9], weight, 4, score="softmax", renormalise=True)
    route(*weights(32, 2880), 4, score="softmax_after_topk", renormalise=False, bias=torch.empty(32))
    route_widely()


QWEN = RecordLayout((2 * 1408, 2048), (2048, 1408), False)
OAI = RecordLayout((2880, 2 * 2880), (2880, 2880), True, form=WeightForm.MXFP4)


def lane_of(
    tokens: int, experts: int, top_k: int, layout: RecordLayout = QWEN, quantum: int = 128
) -> tuple[LaneView, ResidencyView, StageView]:
    """What a layer with such experts sees."""
    words, numbers = torch.empty(experts, dtype=torch.int64), torch.empty(experts)
    whole = torch.empty(experts, dtype=torch.int32)
    box = MailboxLayout(tokens, top_k, experts, layout.hidden)
    stage = StageBlock([layout] * 2, 64 if layout.fp8 else 32, torch.bfloat16, torch.device("cpu")).view(1)
    rest = RestBlock([layout], [layout.mxfp4], [quantum], torch.bfloat16, torch.device("cpu")).view(0)
    assert stage is not None and rest is not None
    return (
        LaneView(1 << 40, box, 0, layout.inner, quantum, words, words, numbers, 1, whole, whole, rest),
        ResidencyView(words, words, words, numbers, words, words, whole, words),
        stage,
    )


def grouping() -> None:
    """A window's choices, divided between GPU and CPU, with a part copied ahead, and as they are; of one
    token, and of several with many experts. What is foretold, and copied ahead."""
    for tokens, experts, top_k in ((1, 60, 4), (9, 512, 10)):
        lane, residency, stage = lane_of(tokens, experts, top_k)
        index, live = torch.empty(tokens, top_k, dtype=torch.int64), lane.words[:1]
        groups = group_pairs(index, live, residency, lane)
        post_job(torch.empty(tokens, 2048, dtype=torch.bfloat16), groups, live, lane, top_k)
        group_pairs(index, live, residency, None, stage)
        for told in ({"lane": lane}, {"stage": stage}):
            foretell(index[:1], torch.empty(1, top_k, dtype=torch.bfloat16), residency, 1, **told)
        copy_ahead(stage, residency)
    group_pairs(index, live, residency)
    assert lane.rest is not None
    copy_rest(lane.rest)


def groups_of(
    index: Tensor, live: Tensor, residency: ResidencyView, *both: LaneView | StageView | None
) -> Groups:
    """As group_pairs returns them; what divides choices is compiled in grouping alone."""
    compiling = JITFunction.run
    JITFunction.run = lambda kernel, *args, **options: None
    try:
        return group_pairs(index, live, residency, *both)  # type: ignore[arg-type]
    finally:
        JITFunction.run = compiling


def as_streamed(groups: Groups) -> Groups:
    """Of a long prompt, whose experts are all here."""
    return replace(groups, ticket=None, landing=None)


def routed() -> None:
    """16-bit experts: beside the CPU, with a part copied ahead, and gpt-oss's; likewise those in MXFP4;
    packed ones likewise, and of prompts; without a gate, in 16 bits and packed."""
    lane, residency, stage = lane_of(9, 60, 4)
    x, index = torch.empty(9, 2048, dtype=torch.bfloat16), torch.empty(9, 4, dtype=torch.int64)
    shape, live, shares = (
        ExpertShape(2048, 1408, False, Activation("silu")),
        lane.words[:1],
        torch.empty(9, 4),
    )
    for both in ((lane, None), (None, stage)):
        groups = groups_of(index, live, residency, *both)
        routed_experts(x, groups, index, shares, live, live, shape, 60, lane=both[0])
    for form in (WeightForm.BF12, WeightForm.FP8, WeightForm.NVFP4, WeightForm.INT4, WeightForm.INT4_32):
        packed = replace(shape, form=form)
        _, _, ahead = lane_of(9, 60, 4, replace(QWEN, form=form), 64)
        copy_ahead(ahead, residency)
        for view, part, rows in ((lane, None, 16), (None, ahead, 16), (None, None, 64)):
            groups = groups_of(index, live, residency, view, part)
            if rows == 64:
                stream(x, groups, index, shares, live, packed, 60)
            else:
                routed_experts(x, groups, index, shares, live, live, packed, 60, block_rows=rows, lane=view)
    oai = ExpertShape(2880, 2880, True, Activation("swiglu_oai", 1.702, 7.0, interleaved=True))
    x, biases = torch.empty(9, 2880, dtype=torch.bfloat16), torch.empty(32, 5760, dtype=torch.bfloat16)
    groups = groups_of(index, live, residency)
    routed_experts(
        x, groups, index, shares, live, live, oai, 32,
        gate_up_bias=biases, down_bias=biases[:, :2880],
    )  # fmt: skip
    coded = replace(oai, form=WeightForm.MXFP4)  # of which 16 rows are what lanes have
    stream(x, groups, index, shares, live, coded, 32, biases, biases[:, :2880])
    lane, residency, stage = lane_of(9, 32, 4, OAI, 64)
    copy_ahead(stage, residency)
    for both in ((lane, None), (None, stage)):
        routed_experts(
            x, groups_of(index, live, residency, *both), index, shares, live, live, shape, 32,
            gate_up_bias=biases, down_bias=biases[:, :2880], lane=both[0],
        )  # fmt: skip
    x, ungated = x[:, :2688], ExpertShape(2688, 1856, False, Activation("relu", gated=False))
    for shape in (ungated, replace(ungated, form=WeightForm.BF12)):
        routed_experts(x, groups_of(index, live, residency), index, shares, live, live, shape, 60)


def asking() -> None:
    """A prompt's pass that asks for its experts, beside the CPU and alone: in 16 bits, packed, in MXFP4."""
    index = torch.empty(600, 8, dtype=torch.int64)
    lane, residency, _ = lane_of(600, 128, 8)
    group_pairs(index, lane.words[:1], residency, lane, most_tokens=1024)
    oai = Activation("swiglu_oai", 1.702, 7.0, interleaved=True)
    shape = ExpertShape(2048, 1408, False, Activation("silu"))
    coded = ExpertShape(2880, 2880, True, oai, WeightForm.MXFP4)
    for one, layout, quantum in (
        (shape, QWEN, 64), (replace(shape, form=WeightForm.BF12), QWEN, 128), (coded, OAI, 64),
    ):  # fmt: skip
        x = torch.empty(600, one.hidden, dtype=torch.bfloat16)
        lane, residency, _ = lane_of(600, 128, 8, layout, quantum)
        for view in (lane, None):
            groups, live = groups_of(index, lane.words[:1], residency, view), lane.words[:1]
            weights = torch.empty(600, 8)
            routed_experts(x, groups, index, weights, live, live, one, 128, block_rows=STREAM_ROWS, lane=view)


def stream(
    x: Tensor, groups: Groups, index: Tensor, weights: Tensor, live: Tensor, shape: ExpertShape, experts: int,
    *biases: Tensor,
) -> None:  # fmt: skip
    """What a long prompt launches of a group."""
    tokens, top_k = index.shape
    inner = torch.empty(tokens * top_k, shape.inner, dtype=x.dtype)
    out = torch.empty(tokens * top_k, shape.hidden, dtype=torch.float32)
    added = biases or (None, None)
    run_groups(x, as_streamed(groups), top_k, live, shape, inner, out, *added, STREAM_ROWS, STREAM_SHARE)
    combine(out, index, weights, live, experts, x.dtype)


def choices() -> None:
    words, seen = torch.empty(6, dtype=torch.int64), torch.empty(151_936, dtype=torch.int32)
    logits = torch.empty(9, 151_936, dtype=torch.bfloat16)
    choose_tokens(logits, torch.empty(9, dtype=torch.int64), ChoiceView(words, seen))


def newest() -> None:
    """Each kernel whose sizes differ, at a few of them; of attention the rarest kind and the largest one."""
    products(33, SIZES[:2])
    one_row(ROW_SIZES[:1])
    attend(1024, (HEADS[1], *HEADS[3:]))
    router(())


LAUNCHES: dict[str, Callable[[], None]] = {
    "few": lambda: products(9),
    "window": lambda: products(33),
    "prompt": lambda: products(1024),
    "one_row": one_row,
    "packed": packed,
    "rows": rows,
    "delta": delta,
    "channel_delta": channel_delta,
    "state_space": state_space,
    "convolution": convolution,
    "split": lambda: attend(9),
    "sections": sections,
    "loop": lambda: attend(1024),
    "latent_split": lambda: latent(9),
    "latent_loop": lambda: latent(1024),
    "router": router,
    "newest": newest,
    "grouping": grouping,
    "routed": routed,
    "asking": asking,
    "choices": choices,
}


def main() -> None:
    linear_module.num_multiprocessors = lambda device: 132  # type: ignore[assignment]
    routed_module.takes_ptx = packed_module.takes_ptx = lambda x: True  # type: ignore[assignment]
    for wish in sys.argv[1:]:
        capability, names = wish.split("=")
        JITFunction.run = compile_instead(GPUTarget("cuda", int(capability), 32))
        for name in names.split(","):
            LAUNCHES[name]()


if __name__ == "__main__":
    main()
