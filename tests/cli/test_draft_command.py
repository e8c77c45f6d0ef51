"""The `localmoe draft` command: what it builds, what it says, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.mtp_models import mtp_model
from support.tiny_models import tiny_model, write_model

from localmoe.cli import draft
from localmoe.cli.main import main
from localmoe.cli.output import ProgressBars
from localmoe.core.draft_config import DraftSettings, GptqSettings, nf4_settings
from localmoe.core.types import Progress
from localmoe.engine import drafting

FEW = ("--calibration-tokens", "4096", "--device", "cpu")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command, in this process."""
    try:
        code = main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.slow
def test_draft_builds_by_gptq_into_the_named_folder_and_generate_uses_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "draft"
    code, text, _ = run(capsys, "draft", "demo", "--out", str(out), *FEW)
    assert (code, text) == (0, f"{out}\n")
    provenance = json.loads((out / "localmoe_draft.json").read_text())
    assert (provenance["method"], provenance["bits"]) == ("gptq", 4)
    assert json.loads((out / "quantize_config.json").read_text())["bits"] == 4
    code, text, _ = run(
        capsys, "generate", "demo", "--prompt", "hello", "--draft", str(out), "--draft-length", "2", "--json",
        "--max-new-tokens", "8", "--device", "cpu",
    )  # fmt: skip
    assert code == 0 and json.loads(text)["stats"]["drafted"] > 0


def test_where_a_layer_would_draft_unasked_it_says_how_the_draft_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path / "home"))
    for folder, has_layer in ((mtp_model(tmp_path / "layer", "glm4_moe"), True), (tmp_path / "plain", False)):
        if not has_layer:
            write_model(folder, tiny_model("qwen2_moe"))
        code, text, err = run(capsys, "draft", str(folder), "--method", "rtn", "--device", "cpu")
        assert code == 0 and Path(text.strip()).is_dir() and ("--drafter self" in err) == has_layer
    code, _, err = run(capsys, "draft", str(tmp_path / "layer"), "--method", "rtn", "--bits", "3")
    assert code == 0 and "--drafter" not in err, "--draft-bits 3 asks for it"
    named = str(tmp_path / "named")
    code, _, err = run(capsys, "draft", str(tmp_path / "layer"), "--method", "rtn", "--out", named)
    assert code == 0 and "--drafter" not in err, "it is used by its name"


def test_a_draft_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "draft"
    assert run(capsys, "draft", "demo", "--method", "rtn", "--bits", "3", "--out", str(out))[0] == 0
    provenance = json.loads((out / "localmoe_draft.json").read_text())
    assert (provenance["method"], provenance["bits"]) == ("rtn", 3)
    provenance["base_fingerprint"] = "0" * 64
    (out / "localmoe_draft.json").write_text(json.dumps(provenance))
    code, text, err = run(capsys, "generate", "demo", "--prompt", "hi", "--draft", str(out))
    assert (code, text) == (1, "") and "another model" in err


@pytest.mark.parametrize("method", ["gptq", "rtn"])
def test_a_place_that_cannot_be_written_is_refused_before_weights_are_read(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(*args: object, **options: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(drafting, "load_weights", read)
    (tmp_path / "file").write_text("mine")
    for out in ("file", "file/below", "new/" + "a" * 250, "a" * 250):
        code, text, err = run(capsys, "draft", "demo", "--method", method, "--out", str(tmp_path / out))
        lines = [line for line in err.splitlines() if line.strip()]
        assert (code, text) == (1, "") and len(lines) == 1 and "choose another folder" in lines[0], out
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_mount_point_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(*args: object, **options: object) -> None:
        raise AssertionError("weights are read")

    monkeypatch.setattr(drafting, "load_weights", read)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "disk")
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for out in ("disk", "link"):
        code, text, err = run(capsys, "draft", "demo", "--method", "rtn", "--out", str(tmp_path / out))
        assert (code, text) == (1, "") and "disk is a mount point" in err and "a folder inside it" in err
    assert list((tmp_path / "disk").iterdir()) == []


Call = tuple[str, Path | None, DraftSettings]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What the command asks the engine for; nothing is built."""
    seen: list[Call] = []

    def build(model: str, out: Path | None, settings: DraftSettings, progress: Any) -> Path:
        seen.append((model, out, settings))
        progress(Progress("Building", 3, 24, "experts", 200.0, "output error 60 % of rounding to nearest"))
        return Path("there")

    monkeypatch.setattr(draft, "build_draft", build)
    return seen


def test_without_options_the_settings_are_the_defaults(
    capsys: pytest.CaptureFixture[str], calls: list[Call]
) -> None:
    code, out, _ = run(capsys, "draft", "demo")
    assert (code, out, calls) == (0, "there\n", [("demo", None, DraftSettings())])


def test_a_bar_shows_the_time_that_is_left_and_how_good_the_draft_is() -> None:
    bars = ProgressBars()
    bars(Progress("Building", 3, 24, "experts", 200.0, "output error 60 % of rounding to nearest"))
    bars(Progress("Loading", 1, 24, "layers"))
    amounts = [task.fields["amount"] for task in bars._bars.tasks]
    assert amounts == [
        "3 of 24 experts, 3 min left, output error 60 % of rounding to nearest", "1 of 24 layers"
    ]  # fmt: skip


def test_every_option_reaches_the_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], calls: list[Call]
) -> None:
    code, _, _ = run(
        capsys, "draft", "some/model", "--method", "gptq", "--bits", "2", "--group-size", "64", "--out", "x",
        "--calibration", "text.jsonl", "--calibration-tokens", "5000", "--seed", "9", "--no-gate-weighted",
        "--device", "cpu", "--vram-budget", "3GiB",
    )  # fmt: skip
    gptq = GptqSettings(2, 64, 5000, seed=9, gate_weighted=False)
    expected = DraftSettings("gptq", gptq, Path("text.jsonl"), "cpu", 3 << 30)
    assert (code, calls) == (0, [("some/model", Path("x"), expected)])


def test_nf4_brings_its_own_bits_and_groups_and_takes_no_others(
    capsys: pytest.CaptureFixture[str], calls: list[Call]
) -> None:
    assert run(capsys, "draft", "demo", "--method", "nf4")[0] == 0
    assert run(capsys, "draft", "demo", "--method", "nf4", "--bits", "4", "--group-size", "64")[0] == 0
    assert calls == [("demo", None, nf4_settings())] * 2
    for option in (("--bits", "3"), ("--group-size", "128")):
        code, out, err = run(capsys, "draft", "demo", "--method", "nf4", *option)
        assert (code, out) == (1, "") and "NF4 has 4 bits and groups of 64" in err
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--method", "awq"), ("--bits", "5"), ("--bits", "four"), ("--group-size", "100"),
        ("--device", "tpu"), ("--vram-budget", "0"), ("--calibration-tokens", "many"), ("--seed", "1.5"),
    ],
)  # fmt: skip
def test_values_that_no_option_has_are_usage_errors(
    option: str, value: str, capsys: pytest.CaptureFixture[str], calls: list[Call]
) -> None:
    code, out, err = run(capsys, "draft", "demo", option, value)
    assert (code, out) == (2, "") and option in err.splitlines()[-1]
    assert not calls


@pytest.mark.parametrize("method", ["rtn", "nf4"])
@pytest.mark.parametrize(
    "options",
    [("--calibration", "x"), ("--calibration-tokens", "65536"), ("--seed", "0"), ("--no-gate-weighted",)],
)
def test_a_method_that_is_not_calibrated_takes_no_calibration(
    method: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str], calls: list[Call]
) -> None:
    code, out, err = run(capsys, "draft", "demo", "--method", method, *options)
    assert (code, out, calls) == (2, "", []) and f"--method {method} is not calibrated" in err


@pytest.mark.parametrize("files", ["quantize_config.json", "config.json", "nf4", "none", "broken", "deep"])
def test_bits_that_the_draft_folder_has_not_are_refused(
    files: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, dict[str, Any]] = {
        "quantize_config.json": {"quantize_config.json": {"bits": 4, "group_size": 128}},
        "config.json": {"config.json": {"quantization_config": {"bits": 4, "quant_method": "gptq"}}},
        "nf4": {"config.json": {"quantization_config": {"load_in_4bit": True}}},
        "broken": {"quantize_config.json": {"bits": "4"}},
    }
    for name, content in settings.get(files, {}).items():
        (tmp_path / name).write_text(json.dumps(content))
    if files == "deep":
        (tmp_path / "config.json").write_text("[" * 100_000)
    # there is no such model, so what gets past the options is refused with exit code 1
    argv = ("generate", str(tmp_path / "none"), "--prompt", "x", "--draft", str(tmp_path), "--draft-bits")
    code, out, err = run(capsys, *argv, "3")
    if files in ("none", "broken", "deep"):
        assert code == 1 and "neither a folder" in err
    else:
        assert (code, out) == (2, "") and "--draft-bits 3 contradicts" in err and "of 4 bits" in err
    assert run(capsys, *argv, "4")[0] == 1


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--calibration-tokens", "0", "0 calibration tokens are too few"),
        ("--calibration-tokens", "-5", "-5 calibration tokens are too few"),
        ("--seed", "-1", "Seed -1 is out of range"),
        ("--seed", str(1 << 63), "is out of range"),
        ("--calibration", "no/such.jsonl", "The calibration text no/such.jsonl cannot be read"),
    ],
)
def test_values_out_of_range_are_refused_in_one_sentence(
    option: str, value: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "draft", "demo", option, value, "--device", "cpu")
    assert (code, out) == (1, "") and sentence in err
    lines = [line for line in err.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("localmoe: ")
