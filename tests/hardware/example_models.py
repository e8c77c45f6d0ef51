"""Footprints of real and of arbitrary models, and a machine, for tests of plans and limits."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from localmoe.core.types import ModelFootprint
from localmoe.hardware.facts import Gpu, Hardware

GIB = 1 << 30

QWEN = ModelFootprint(
    name="Qwen1.5-MoE-A2.7B",
    architecture="qwen2_moe",
    num_layers=24,
    num_experts=60,
    experts_per_token=4,
    expert_params=3 * 2048 * 1408,
    expert_bytes=2 * 3 * 2048 * 1408,
    shared_params=1_860_000_000,
    shared_bytes=3_720_000_000,
    kv_bytes_per_token=24 * 2 * 2048 * 2,
    draft_expert_bytes=3 * 2048 * 1408 * 17 // 32,
    max_context=8192,
    hidden_size=2048,
    vocab_size=151_936,
    can_rollback=True,
    embedding_params=151_936 * 2048,
)

MACHINE = Hardware(
    gpus=(),
    gpu_note="",
    cpu_name="Example CPU",
    physical_cores=8,
    logical_cores=16,
    cpu_flags=("avx2",),
    ram_total_bytes=64 * GIB,
    ram_available_bytes=60 * GIB,
    disk_free_bytes=100 * GIB,
    memory_copy_bytes_per_s=20e9,
    platform="Linux",
    python_version="3.11.7",
    torch_version="2.13.0",
)

GPU = Gpu(
    index=0,
    name="Example GPU",
    total_bytes=16 * GIB,
    free_bytes=15 * GIB,
    driver_used_bytes=GIB,
    compute_capability=(8, 9),
    pcie_generation=4,
    pcie_width=16,
    h2d_bytes_per_s=25e9,
    device_bytes_per_s=600e9,
)


@st.composite
def footprints(draw: st.DrawFn) -> ModelFootprint:
    """Any shape of model, from a toy to hundreds of billions of parameters."""
    hidden = draw(st.integers(8, 8192))
    expert_params = 3 * hidden * draw(st.integers(8, 16384))
    num_experts = draw(st.integers(2, 256))
    shared_params = draw(st.integers(1000, 10**10))
    return replace(
        QWEN,
        num_layers=draw(st.integers(1, 96)),
        num_experts=num_experts,
        experts_per_token=draw(st.integers(1, min(16, num_experts))),
        expert_params=expert_params,
        expert_bytes=2 * expert_params,
        shared_params=shared_params,
        shared_bytes=2 * shared_params,
        kv_bytes_per_token=draw(st.integers(2, 2**20)),
        draft_expert_bytes=expert_params * draw(st.integers(14, 20)) // 32,
        hidden_size=hidden,
        vocab_size=draw(st.integers(100, 300_000)),
        embedding_params=draw(st.integers(0, shared_params)),
    )
