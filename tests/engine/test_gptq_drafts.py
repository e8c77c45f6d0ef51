"""GPTQ drafts from end to end: every architecture drafts with its own; what cannot be built is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gptq_builds import SMALL, build, small, weights_of
from safetensors.torch import load_file, save_file
from support.engines import ROOMY, ask, check_stats
from support.tiny_models import ARCHITECTURES, UNGATED_ARCHITECTURE, tiny_model, write_model

from localmoe.core.config import EngineConfig
from localmoe.core.draft_config import DraftSettings
from localmoe.core.errors import DraftError
from localmoe.engine import Engine, drafting
from localmoe.hub.checkpoint import Checkpoint
from localmoe.quant import draft_folder
from localmoe.quant.calibration import read_calibration
from localmoe.quant.draft_writer import DraftWriter

Tiny = Callable[[str], tuple[Path, Any]]
PROMPT = "hello world, this is a test"


def engine_with(model: Path | str, draft: Path | None, draft_length: int = 4) -> Engine:
    config = EngineConfig(vram_budget_bytes=ROOMY, device="cpu", draft_length=draft_length, draft_dir=draft)
    return Engine.load(str(model), config)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home of localmoe's."""
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, UNGATED_ARCHITECTURE])
def test_answers_drafted_by_gptq_are_those_of_plain_decoding(
    architecture: str, tiny: Tiny, tmp_path: Path, home: Path
) -> None:
    folder = tiny(architecture)[0]
    draft, done = build(folder, tmp_path / "draft", small(bits=8))
    layers = 2 if architecture == "deepseek_v2" else 3
    assert done == list(range(1, 8 * layers + 1))
    with engine_with(folder, draft) as engine:
        info = engine.info()
        assert "INT8 GPTQ, group 128" in str(info.draft)
        plain = ask(engine, PROMPT, 32, draft_length=0)
        drafted = ask(engine, PROMPT, 32, draft_length=4)
        check_stats(drafted)
        assert drafted.tokens == plain.tokens
        assert drafted.stats.acceptance_rate > 0.6
    assert not list(home.rglob("*.safetensors")), "nothing else was built"


@pytest.mark.slow
def test_of_two_seeds_the_same_gives_the_same_bytes_and_another_others(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny("qwen3_moe")[0]
    drafts = [build(folder, tmp_path / str(i), small(seed=seed))[0] for i, seed in enumerate((0, 0, 1))]
    first, again, other = map(weights_of, drafts)
    assert first == again and len(first) == 4
    assert all(first[name] != other[name] for name in first if name.endswith(".safetensors"))


def test_a_draft_says_what_makes_it_again(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("a" * 40)
    folder = write_model(snapshot, tiny_model("mixtral"))
    draft, _ = build(folder, tmp_path / "draft", small(seed=5, bits=3, group_size=64, gate_weighted=True))
    built_in = read_calibration().digest
    found = json.loads((draft / "localmoe_draft.json").read_text())
    expected = {
        "method": "gptq", "bits": 3, "group_size": 64, "seed": 5, "base_revision": "a" * 40,
        "base_fingerprint": Checkpoint.open(folder).fingerprint(), "calibration_hash": built_in,
        "settings": {"num_tokens": 1024, "sequence_length": 64, "gate_weighted": True, "act_order": True},
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    text = tmp_path / "own.txt"
    text.write_text("some text of my own, " * 100)
    other, _ = build(folder, tmp_path / "other", replace(SMALL, calibration=text))
    found = json.loads((other / "localmoe_draft.json").read_text())
    assert found["calibration_hash"] == read_calibration(text).digest != built_in
    assert str(tmp_path) not in (other / "localmoe_draft.json").read_text()
    rounded, done = build(folder, tmp_path / "rounded", DraftSettings("rtn"))
    found = json.loads((rounded / "localmoe_draft.json").read_text())
    assert (found["method"], found["calibration_hash"], found["settings"]) == ("rtn", "", {})
    assert done == list(range(25))


def test_a_draft_of_another_revision_or_of_other_weights_is_refused(tmp_path: Path, home: Path) -> None:
    snapshots = tmp_path / "models--a--b" / "snapshots"
    folder = write_model(snapshots / ("a" * 40), tiny_model("olmoe"))
    draft, _ = build(folder, tmp_path / "draft")
    newer = Path(shutil.copytree(folder, snapshots / ("b" * 40)))
    others = write_model(tmp_path / "others", tiny_model("olmoe", seed=1))
    for model, what in ((newer, "revision aaaaaaaaaaaa .*not to bbbbbbbbbbbb"), (others, "another model")):
        with pytest.raises(DraftError, match=what) as refusal:
            engine_with(model, draft)
        assert "\n" not in str(refusal.value) and "localmoe draft" in str(refusal.value)
    with engine_with(folder, draft) as engine:
        assert ask(engine, PROMPT).stats.accepted > 0


@pytest.mark.slow
def test_the_settings_change_the_draft(tiny: Tiny, tmp_path: Path) -> None:
    folder = tiny("qwen2_moe")[0]
    changes: list[dict[str, Any]] = [
        {}, {"gate_weighted": False}, {"act_order": False}, {"num_tokens": 2048}, {"sequence_length": 32},
        {"bits": 2}, {"group_size": 32},
    ]  # fmt: skip
    drafts = [build(folder, tmp_path / str(i), small(**change))[0] for i, change in enumerate(changes)]
    found = [tuple(weights_of(draft).values()) for draft in drafts]
    assert len(set(found)) == len(changes)


def test_a_sequence_is_no_longer_than_the_model_can_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model", tiny_model("olmoe", max_position_embeddings=48))
    tokens: list[torch.Tensor] = []
    original = drafting.GptqBuild

    def noting(skeleton: Any, store: Any, given: torch.Tensor, *args: Any) -> Any:
        tokens.append(given)
        return original(skeleton, store, given, *args)

    monkeypatch.setattr(drafting, "GptqBuild", noting)
    build(folder, tmp_path / "draft")
    build(folder, tmp_path / "other", small(sequence_length=20, num_tokens=20 * 11))
    assert [tuple(given.shape) for given in tokens] == [(20, 48), (8, 20)], "whole batches of four"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("absent.txt", None, "cannot be read"), ("latin.txt", b"sch\xf6n", "is not UTF-8 text"),
        ("bad.jsonl", b'{"text": "fine"}\n{"txt": "not"}\n', "Line 2 of the calibration text"),
        ("short.txt", b"x" * 511, r"\(short\.txt\) has 511 tokens, and at least 512 are needed"),
    ],
)  # fmt: skip
def test_a_calibration_text_that_cannot_be_used_is_refused_in_one_sentence(
    name: str, content: bytes | None, reason: str, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    if name != "short.txt":
        monkeypatch.setattr(drafting, "load_weights", lambda *args, **rest: pytest.fail("weights are read"))
    with pytest.raises(DraftError, match=reason) as refusal:
        build(tiny("mixtral")[0], tmp_path / "draft", replace(SMALL, calibration=tmp_path / name))
    assert "\n" not in str(refusal.value) and str(refusal.value).endswith(".")
    assert not any("draft" in path.name for path in tmp_path.iterdir())


def test_a_text_just_long_enough_is_used(tiny: Tiny, tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("The quick brown fox jumps. " * 19)
    assert len(text.read_text()) == 513
    build(tiny("mixtral")[0], tmp_path / "draft", replace(SMALL, calibration=text))


def test_too_little_disk_space_is_refused_before_anything_is_quantised(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_folder.shutil, "disk_usage", lambda folder: SimpleNamespace(free=33 << 19))
    monkeypatch.setattr(drafting, "GptqBuild", lambda *args: pytest.fail("something is quantised"))
    with pytest.raises(DraftError, match=r"needs 16\.\d MiB of disk space and .* has 16\.5 MiB free"):
        build(tiny("olmoe")[0], tmp_path / "draft")
    assert list(tmp_path.iterdir()) == []


def test_a_weight_that_is_not_finite_is_refused_and_nothing_is_kept(tiny: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("qwen2_moe")[0], tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if "layers.1." in name and "experts.3.up" in name)
    weights[name][2, 5] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DraftError, match=r"in decoder layer 1, .* NaN; download the model again\.$"):
        build(folder, tmp_path / "draft")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_gpu_whose_memory_runs_out_costs_a_sentence_and_no_finished_layer(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, add = tiny("olmoe")[0], DraftWriter.add_layer

    def full(self: DraftWriter, decoder_layer: int, experts: Any) -> None:
        if decoder_layer == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        add(self, decoder_layer, experts)

    with monkeypatch.context() as patch:
        patch.setattr(DraftWriter, "add_layer", full)
        with pytest.raises(DraftError, match=r"memory ran out .* smaller --vram-budget") as refusal:
            build(folder, tmp_path / "draft")
    assert "\n" not in str(refusal.value)
    assert build(folder, tmp_path / "draft")[1][0] == 8


def test_a_build_counts_on_no_more_memory_than_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4000, 10_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1000)
    assert drafting._memory_for_a_build(torch.device("cuda", 0)) == 5700
    monkeypatch.setattr(drafting.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert drafting._memory_for_a_build(torch.device("cpu")) == 500


def test_a_draft_that_the_user_named_is_not_replaced(tiny: Tiny, home: Path, tmp_path: Path) -> None:
    folder = tiny("olmoe")[0]
    named, _ = build(folder, tmp_path / "rounded", DraftSettings("rtn"))
    with Engine.load(
        str(folder), EngineConfig(vram_budget_bytes=ROOMY, device="cpu", draft_dir=named)
    ) as engine:
        assert engine.why_no_better_draft() == "the draft is one that was named"
        with pytest.raises(DraftError, match="No better draft can be built here: the draft is one that was"):
            engine.improve_draft()
    with Engine.load(str(folder), EngineConfig(vram_budget_bytes=ROOMY, device="cpu")) as engine:
        assert engine.why_no_better_draft() == ""
