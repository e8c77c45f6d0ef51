"""Whether a model runs whose experts lie on the disk, as RAM does not hold them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hardware.example_models import QWEN as FOOTPRINT

from localmoe.core.config import EngineConfig
from localmoe.core.model_facts import Fit, ModelFacts
from localmoe.engine import Engine
from localmoe.engine.facts import local_facts
from localmoe.engine.fit import fit_model, fit_or_from_disk
from localmoe.engine.planning import plan_model
from localmoe.engine.suggestions import SUGGESTIONS
from localmoe.hardware.facts import Gpu, Hardware
from localmoe.hardware.limits import Rates

Tiny = Callable[[str], Path]
GIB = 1 << 30
RATES = Rates(400e9, 25e9)
GPU = Gpu(0, "a card", 12 * GIB, 11 * GIB, None, (8, 9), 4, 16, 25e9, 400e9)
WITHOUT_GPU = Hardware(
    (), "", "a CPU", 8, 16, (), 16 * GIB, 15 * GIB, 100 * GIB, 20e9, "Linux", "3.12", "2"
)  # fmt: skip
WITH_GPU = replace(WITHOUT_GPU, gpus=(GPU,))
ON_DISK = EngineConfig(experts_on="disk")
QWEN = next(one.facts for one in SUGGESTIONS if one.repo_id == "Qwen/Qwen1.5-MoE-A2.7B-Chat")


@pytest.mark.parametrize("computer", [WITHOUT_GPU, WITH_GPU])
def test_what_ram_does_not_hold_fits_from_the_disk_and_no_speed_is_promised(computer: Hardware) -> None:
    refused = fit_model(QWEN, computer, RATES)
    assert not refused.fits and refused.disk_bytes == 0 and "of host RAM" in refused.reason
    fit = fit_model(QWEN, computer, RATES, ON_DISK)
    assert fit.fits and fit.tokens_per_s is None
    assert 0 < fit.ram_share < 1 and fit.ram_bytes <= computer.ram_available_bytes
    assert fit.plan is not None and fit.plan.disk_bytes <= fit.disk_bytes < 1.01 * fit.plan.disk_bytes
    assert not fit.disk_is_written


def test_the_disk_has_to_hold_the_download_and_the_file_beside_it() -> None:
    fit = fit_model(QWEN, WITHOUT_GPU, None, ON_DISK, download_bytes=QWEN.num_bytes)
    margin = 256 << 20  # that the engine leaves free (experts.record_file)
    for short, wanted, download in (
        (1, "the experts' file", 0), (1, "the download and the experts' file", QWEN.num_bytes),
        (0, "", 0), (0, "", QWEN.num_bytes),
    ):  # fmt: skip
        room = replace(WITHOUT_GPU, disk_free_bytes=fit.disk_bytes + download + margin - short)
        found = fit_model(QWEN, room, None, ON_DISK, download_bytes=download)
        assert (found.fits, found.missing_disk_bytes) == (not short, short)
        assert wanted in found.reason and bool(found.reason) == bool(short)
    apart = replace(  # models lie on another disk
        WITHOUT_GPU, disk_free_bytes=QWEN.num_bytes + (1 << 30), home_free_bytes=fit.disk_bytes + margin
    )
    assert fit_model(QWEN, apart, None, ON_DISK, download_bytes=QWEN.num_bytes).fits
    for lacks, wanted in (("disk_free_bytes", "the download"), ("home_free_bytes", "the experts' file")):
        found = fit_model(
            QWEN, replace(apart, **{lacks: 1 << 30}), None, ON_DISK, download_bytes=QWEN.num_bytes
        )
        assert not found.fits and found.reason.endswith(f"too little room for {wanted}.")
    full = replace(WITHOUT_GPU, disk_free_bytes=0)
    there = fit_model(replace(QWEN, record_files=(1 << 40, fit.disk_bytes)), full, None, ON_DISK)
    assert there.fits and there.disk_is_written
    other_form = fit_model(replace(QWEN, record_files=(fit.disk_bytes * 4 // 3,)), full, None, ON_DISK)
    assert not other_form.fits and not other_form.disk_is_written


def test_it_is_the_planners_own_plan_and_the_file_is_known_once_it_is_written(
    tiny16: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path))
    monkeypatch.setattr("localmoe.engine.planning.probe_hardware", lambda measure: WITHOUT_GPU)
    folder = str(tiny16("qwen2_moe"))
    facts = local_facts(folder)
    config = replace(ON_DISK, device="cpu", ram_budget_bytes=1 << 20)
    footprint, plan = plan_model(folder, config)
    fit = fit_model(facts, WITHOUT_GPU, RATES, config)
    assert fit.plan == plan and plan.ram_experts < footprint.total_experts
    assert fit.ram_share == plan.ram_experts / footprint.total_experts
    with Engine.load(folder, config) as engine:
        assert engine.plan.ram_experts == plan.ram_experts
    written = local_facts(folder)
    assert written.record_files and ModelFacts.from_dict(written.as_dict()) == written
    assert [path.stat().st_size for path in tmp_path.rglob("*.records")] == list(written.record_files)
    fit = fit_model(written, replace(WITHOUT_GPU, disk_free_bytes=0), RATES, config)
    assert fit.fits and fit.disk_is_written and written.record_files[0] <= fit.disk_bytes


def test_facts_of_before_have_no_such_files() -> None:
    kept = ModelFacts(FOOTPRINT, 2, GIB).as_dict()
    del kept["record_files"]
    assert ModelFacts.from_dict(kept).record_files == ()


def test_what_ram_alone_refuses_is_asked_for_from_the_disk_and_nothing_else() -> None:
    def asked(computer: Hardware, **config: int) -> Fit:
        in_ram = EngineConfig(**config)
        return fit_or_from_disk(QWEN, computer, RATES, in_ram, replace(in_ram, experts_on="disk"))

    for computer in (WITHOUT_GPU, WITH_GPU):
        assert asked(computer) == fit_model(QWEN, computer, RATES, ON_DISK)
        much = replace(computer, ram_total_bytes=64 * GIB, ram_available_bytes=60 * GIB)
        assert asked(much) == fit_model(QWEN, much, RATES)
        full = replace(computer, disk_free_bytes=GIB)
        neither = asked(full)
        assert not neither.fits and "of host RAM" in neither.reason
        assert neither.reason.endswith("too little room for the experts' file.")
        no_ram = replace(computer, ram_available_bytes=GIB)
        assert asked(no_ram) == fit_model(QWEN, no_ram, RATES)
    small_card = replace(WITH_GPU, gpus=(replace(GPU, free_bytes=1 << 30),))
    assert asked(small_card) == fit_model(QWEN, small_card, RATES), "VRAM lacks too"
