"""A draft is built once, found again, and used with its own model only."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.engines import ROOMY, ask, budget_for_slots
from support.tiny_models import tiny_model, write_model

from localmoe.core.config import EngineConfig
from localmoe.core.draft_config import DraftSettings, GptqSettings
from localmoe.core.errors import BudgetError, DraftError, LocalMoeError
from localmoe.core.home import localmoe_home
from localmoe.core.types import Progress
from localmoe.engine import Engine, drafting, row_padding
from localmoe.engine.drafting import build_draft
from localmoe.hardware.host_room import HostRoom

Tiny = Callable[[str], tuple[Path, Any]]
DRAFTING = EngineConfig(vram_budget_bytes=ROOMY, draft_length=4)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home of localmoe's."""
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def files_below(folder: Path) -> dict[Path, int]:
    """Path -> time of the last change, but for what loading measures."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != row_padding.FILE.file_name)
    return {path: path.stat().st_mtime_ns for path in files}


def built_draft(home: Path) -> Path:
    return next(path.parent for path in files_below(home) if path.name == "localmoe_draft.json")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("architecture", ["qwen2_moe", "mixtral", "deepseek_v2", "gpt_oss"])
def test_the_first_load_builds_the_draft_and_the_second_reuses_it(
    architecture: str, tiny: Tiny, home: Path
) -> None:
    folder, reports = str(tiny(architecture)[0]), []

    def load() -> list[int]:
        reports.clear()
        with Engine.load(folder, DRAFTING, progress=reports.append) as engine:
            assert engine.info().draft == "INT4 RTN, group 128"
            answer = ask(engine, "hello", draft_length=4)
            assert answer.stats.accepted > 0
            return answer.tokens

    first = load()
    built = files_below(home)
    assert [report.stage for report in reports if report.unit == "experts"], "the build is reported"
    assert {path.name for path in built} >= {"localmoe_draft.json", "quantize_config.json", "config.json"}
    assert load() == first
    assert files_below(home) == built
    assert not [report for report in reports if report.unit == "experts"], "nothing is built again"


def test_a_draft_of_another_model_is_refused_and_nothing_is_written(
    tiny: Tiny, home: Path, tmp_path: Path
) -> None:
    Engine.load(str(tiny("qwen2_moe")[0]), DRAFTING).close()
    draft = built_draft(home)
    other = write_model(tmp_path / "other", tiny_model("qwen2_moe", seed=1))
    before = files_below(home)
    config = EngineConfig(vram_budget_bytes=ROOMY, draft_length=4, draft_dir=draft)
    with pytest.raises(DraftError, match="belongs to another model") as refusal:
        Engine.load(str(other), config)
    assert "\n" not in str(refusal.value) and "localmoe draft other" in str(refusal.value)
    assert files_below(home) == before


def test_a_named_draft_of_the_right_model_is_used(tiny: Tiny, home: Path, tmp_path: Path) -> None:
    folder = str(tiny("qwen2_moe")[0])
    Engine.load(folder, DRAFTING).close()
    draft = built_draft(home)
    moved = shutil.move(draft, tmp_path / "elsewhere")
    config = EngineConfig(vram_budget_bytes=ROOMY, draft_length=4, draft_dir=Path(moved))
    with Engine.load(folder, config) as engine:
        assert ask(engine, "hello").stats.accepted > 0
    assert not files_below(home)


@pytest.mark.slow
def test_drafts_of_two_models_of_one_name_lie_side_by_side(tiny: Tiny, home: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        folder = write_model(tmp_path / str(seed) / "twin", tiny_model("olmoe", seed=seed))
        Engine.load(str(folder), DRAFTING).close()
    assert len([path for path in files_below(home) if path.name == "localmoe_draft.json"]) == 2


def damage(draft: Path, how: str) -> None:
    weights = max(draft.glob("*.safetensors"))
    match how:
        case "truncated weights":
            weights.write_bytes(weights.read_bytes()[:-1000])
        case "no weights":
            weights.unlink()
        case "foreign config":
            (draft / "config.json").write_text('{"model_type": "qwen2_moe"}')


DAMAGES = ["truncated weights", "no weights", "foreign config"]


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_draft_that_the_user_named_is_refused_and_left_as_it_is(
    how: str, tiny: Tiny, home: Path
) -> None:
    folder = str(tiny("qwen2_moe")[0])
    Engine.load(folder, DRAFTING).close()
    draft = built_draft(home)
    damage(draft, how)
    before = files_below(home)
    with pytest.raises(DraftError, match="localmoe draft") as refusal:
        Engine.load(folder, EngineConfig(vram_budget_bytes=ROOMY, draft_length=4, draft_dir=draft))
    assert "\n" not in str(refusal.value)
    assert files_below(home) == before


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_draft_in_the_default_place_is_built_again(how: str, tiny: Tiny, home: Path) -> None:
    folder = str(tiny("qwen2_moe")[0])
    Engine.load(folder, DRAFTING).close()
    good = {path.name: path.read_bytes() for path in built_draft(home).glob("*.safetensors")}
    damage(built_draft(home), how)
    with Engine.load(folder, DRAFTING) as engine:
        assert ask(engine, "hello").stats.accepted > 0
    assert {path.name: path.read_bytes() for path in built_draft(home).glob("*.safetensors")} == good


def build_small_gptq(folder: str, out: Path | None = None) -> Path:
    return build_draft(folder, out, DraftSettings("gptq", GptqSettings(num_tokens=256, sequence_length=32)))


def test_a_gptq_draft_in_the_default_place_is_preferred_to_a_rounded_one(tiny: Tiny, home: Path) -> None:
    folder = str(tiny("qwen2_moe")[0])
    Engine.load(folder, DRAFTING).close()
    gptq = build_small_gptq(folder)
    assert gptq.name == "int4-gptq-g128" and gptq.parent == built_draft(home).parent
    before = files_below(home)
    with Engine.load(folder, DRAFTING) as engine:
        assert engine.info().draft == "INT4 GPTQ, group 128"
        assert ask(engine, "hello", draft_length=4).stats.accepted > 0
    damage(gptq, "truncated weights")
    with Engine.load(folder, DRAFTING) as engine:
        assert engine.info().draft == "INT4 RTN, group 128", "the next best"
    changed = {path.parent for path, when in files_below(home).items() if before[path] != when}
    assert changed <= {gptq}, "nothing was built"
    shutil.rmtree(gptq.parent / "int4-rtn-g128")
    with Engine.load(folder, DRAFTING) as engine:
        assert engine.info().draft == "INT4 RTN, group 128", "rounded again"


def test_a_draft_of_other_bits_is_used_only_where_it_is_named(tiny: Tiny, home: Path) -> None:
    folder = str(tiny("qwen2_moe")[0])
    three = build_draft(folder, settings=DraftSettings("rtn", GptqSettings(bits=3)))
    assert three.name == "int3-rtn-g128"
    with Engine.load(folder, DRAFTING) as engine:
        assert engine.info().draft == "INT4 RTN, group 128"
    config = EngineConfig(vram_budget_bytes=ROOMY, draft_length=4, draft_dir=three)
    with Engine.load(folder, config) as engine:
        assert engine.info().draft == "INT3 RTN, group 128"


def test_a_draft_with_more_scales_than_planned_keeps_the_budget_or_is_refused(
    tiny: Tiny, home: Path, tmp_path: Path
) -> None:
    folder = str(tiny("qwen2_moe")[0])
    draft = build_draft(folder, tmp_path / "fine", DraftSettings("rtn", GptqSettings(group_size=32)))
    budget = budget_for_slots(folder, 3, draft_length=4)
    config = EngineConfig(vram_budget_bytes=budget, draft_length=4, draft_dir=draft)
    try:
        engine = Engine.load(folder, config)
    except BudgetError:
        return
    with engine:
        assert ask(engine, "hello").stats.accepted > 0
        used = engine.device_memory()
        assert used["draft"] <= engine.plan.draft_bytes
        assert sum(used.values()) + engine.plan.workspace_bytes <= budget + 1024


def test_a_cancelled_draft_build_leaves_nothing(tiny: Tiny, home: Path) -> None:
    cancel = threading.Event()

    def stop_at_third_expert(report: Progress) -> None:
        if report.unit == "experts" and report.done == 3:
            cancel.set()

    with pytest.raises(LocalMoeError, match="cancelled"):
        Engine.load(str(tiny("qwen2_moe")[0]), DRAFTING, progress=stop_at_third_expert, cancel=cancel)
    assert not files_below(home)


def test_drafting_with_an_engine_that_was_loaded_without_a_draft_is_refused(tiny: Tiny, home: Path) -> None:
    config = EngineConfig(vram_budget_bytes=ROOMY, draft_length=0)
    with Engine.load(str(tiny("qwen2_moe")[0]), config) as engine:
        assert not files_below(home) and engine.device_memory()["draft"] == 0
        with pytest.raises(DraftError, match="drafting on"):
            ask(engine, "hello", draft_length=4)
        assert ask(engine, "hello", draft_length="auto").stats.drafted == 0


def test_the_home_of_the_tests_is_not_the_users() -> None:
    assert "localmoe-tests-" in str(localmoe_home())


def test_a_draft_of_a_model_beyond_the_ram_is_refused_before_its_weights_are_read(
    tiny: Tiny, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = HostRoom(1 << 20, 100_000, "the rest stays free", holds_slots=True)
    monkeypatch.setattr(drafting, "host_room", lambda *args, **options: room)
    monkeypatch.setattr(drafting, "load_weights", lambda *args, **options: pytest.fail("weights are read"))
    with pytest.raises(BudgetError, match=r"of host RAM.*close other programs"):
        build_draft(str(tiny("qwen2_moe")[0]))
