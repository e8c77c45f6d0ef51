"""Every dense kernel compiles for the GPUs in use, fits their shared memory, and uses the one tensor-core
instruction that the exactness rule rests on. Needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.kept_builds import kept_builds

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
# every tile is compiled for one capability, and every kernel for the oldest and for the newest: what was for
# both had the same shared memory, loads and instructions, but for waits, which follow the capability
TILES = (
    "few", "window", "one_row", "packed", "rows", "split", "sections", "loop", "latent_split", "latent_loop",
    "router", "choices",
)  # fmt: skip
KERNELS = ("newest", "packed", "rows", "sections", "latent_split", "latent_loop", "choices")
PIPELINED = {
    "_linear", "_linear_gated", "_packed_linear", "_head_linear", "_latent_split", "_latent_loop",
    "attend_loop",
}  # fmt: skip
PRODUCTS = PIPELINED | {"attend_split", "_router_parts"}
ONE_ROW = {"_gemv", "_gemv_gated", "_packed_row"}  # not bound to the rule
OTHERS = {
    "_add",
    "_rms_norm",
    "_rope",
    "_write_kv",
    "_read_rows",
    "_packed_rows",
    "_enter",
    "_leave",
    "_merge_parts",
    "_router_choice",
    "_best_of_chunk",
    "_choose",
}
LANE = {"_group", "_count", "_place", "_post", "_wait_for_answer", "_foretell", "_copy_ahead", "_copy_rest"}
ROUTED = {"gate_up_kernel", "down_kernel", "combine_kernel"}
ALONE = {"_best_of_chunk", "_choose"}  # they wait for all that was issued before, as kernels usually do

WHOLE = {80: TILES, 120: KERNELS}  # capabilities
PROMPTS = (89,)  # a relative of 80: the launches with the most shared memory


@pytest.fixture(scope="module")
def compiled(pytestconfig: pytest.Config) -> list[dict[str, Any]]:
    """One report a kernel, from a process in which Triton compiles what it has not kept."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cache = kept_builds(pytestconfig, "dense")
    wishes = [f"{capability}={','.join(names)}" for capability, names in WHOLE.items()]
    wishes += [f"{capability}=prompt,grouping,routed,asking" for capability in PROMPTS]
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_launches.py"), *wishes],
        env={**kept, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("capability", WHOLE)
def test_kernels_compile_and_fit(capability: int, compiled: list[dict[str, Any]]) -> None:
    reports = [report for report in compiled if report["capability"] == capability]
    assert {report["kernel"] for report in reports} == PRODUCTS | ONE_ROW | OTHERS
    assert {report["kernel"] for report in reports if report["wide"]} == {"_router_parts"}
    check(reports)


@pytest.mark.slow
@pytest.mark.parametrize("capability", PROMPTS)
def test_products_of_prompts_compile_and_fit(capability: int, compiled: list[dict[str, Any]]) -> None:
    check(
        [
            report
            for report in compiled
            if report["capability"] == capability and report["kernel"] not in LANE | ROUTED
        ]
    )


@pytest.mark.slow
def test_a_window_s_division_compiles_for_many_experts(compiled: list[dict[str, Any]]) -> None:
    reports = [report for report in compiled if report["kernel"] in LANE]
    assert {report["kernel"] for report in reports} == LANE
    groups = [report["launch"]["E_PAD"] for report in reports if report["kernel"] == "_group"]
    assert groups == [64, 64, 1024, 1024, 1024, 256]
    assert all(report["shared"] <= 48 * 1024 and not report["mma"] for report in reports)
    assert all(report["16_bytes"] > 0 for report in reports if report["kernel"].startswith("_copy"))


@pytest.mark.slow
def test_routed_experts_compile_and_fit(compiled: list[dict[str, Any]]) -> None:
    reports = [report for report in compiled if report["kernel"] in ROUTED]
    assert [report["kernel"] for report in reports] == 29 * [
        "gate_up_kernel",
        "down_kernel",
        "combine_kernel",
    ]
    for report in reports:
        assert report["shared"] <= 99 * 1024 and not report["other_mma"]
        assert report["mma"] == (report["kernel"] != "combine_kernel"), report


def check(reports: list[dict[str, Any]]) -> None:
    assert reports
    for report in reports:
        assert report["shared"] <= 99 * 1024, report
        assert report["mma"] == (report["kernel"] in PRODUCTS and not report["wide"]), report
        assert not report["other_mma"], report
        assert report["fused"] == (report["kernel"] in ONE_ROW or report["wide"]), report
        pipelined = report["kernel"] in PIPELINED or report["launch"].get("CHUNKS", 1) > 1
        assert report["async"] == pipelined, report
        dependent = report["capability"] >= 90 and report["kernel"] not in ALONE
        assert report["waits"] == dependent, report
