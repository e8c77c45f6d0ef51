"""`localmoe bench --shape`: refusals, and lines that all say that they are synthetic."""

from __future__ import annotations

import json
import re

import pytest
from support.shapes import shape_budget, tiny_shape

from localmoe.cli.main import main
from localmoe.engine import engine as engine_module
from localmoe.model.shapes import SHAPES

SETTINGS = ("--routing", "sticky:0.5", "--synthetic-match", "0.9", "--synthetic-acceptance", "0.8")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one `localmoe bench`, in this process."""
    try:
        code = main(("bench", *argv))
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def small_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every shape is a tiny one."""
    shape = tiny_shape("qwen2_moe")
    monkeypatch.setattr(engine_module, "find_shape", lambda name: shape)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "either a MODEL or --shape"),
        (("demo", "--shape", "olmoe-1b-7b"), "either a MODEL or --shape"),
        (("demo", "--routing", "uniform"), "--routing makes sense with --shape"),
        (("demo", "--synthetic-acceptance", "0.9"), "--synthetic-acceptance makes sense with --shape"),
        (("demo", "--synthetic-match", "0.9"), "--synthetic-match makes sense with --shape"),
        (("demo", "--prompt-tokens", "8"), "--prompt-tokens makes sense with --shape"),
        (("--shape", "olmoe-1b-7b", "--prompts", "x.jsonl"), "--prompts makes sense with a MODEL"),
        (("--shape", "olmoe-1b-7b", "--draft", "x"), "--draft makes sense with a MODEL"),
        (("--shape", "olmoe-1b-7b", "--routing", "random"), "Routing 'random' is unknown"),
        (("--shape", "olmoe-1b-7b", "--routing", "sticky:2"), "from 0 to 1"),
        (("--shape", "olmoe-1b-7b", "--synthetic-acceptance", "90"), "from 0 to 1"),
        (("--shape", "olmoe-1b-7b", "--synthetic-match", "0.9"), "needs a synthetic routing"),
        (("--shape", "olmoe-1b-7b", "--prompt-tokens", "0"), "at least 1"),
    ],
)
def test_options_that_make_no_sense_together_are_usage_errors(
    argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "") and words in err.splitlines()[-1] and "Traceback" not in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--shape", "gpt-5"), " ".join(f"{name}," for name in SHAPES)[:-1]),
        (("--shape", "olmoe-1b-7b", "--policy", "magic"), "magic"),
        (("--shape", "olmoe-1b-7b", "--context", "5000"), "4096"),
    ],
)
def test_what_cannot_be_made_gets_one_sentence(
    argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *argv, "--device", "cpu")
    lines = [line for line in err.splitlines() if line.strip()]
    assert (code, out) == (1, "") and len(lines) == 1
    assert lines[0].startswith("localmoe: ") and words in lines[0]


def test_a_shape_that_does_not_fit_is_refused(small_shape: None, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--shape", "any", "--vram-budget", "1MiB", "--device", "cpu")
    assert (code, out) == (1, "") and "budget of 1.0 MiB is too small" in err


@pytest.mark.parametrize(
    ("option", "words"), [("--limit", "Limit 0 is out of range"), ("--max-new-tokens", "Max new tokens 0 is")]
)
def test_no_prompts_and_no_tokens_are_refused_before_weights_are_made(
    option: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engine_module.Engine, "load_shape", None)
    code, out, err = run(capsys, "--shape", "olmoe-1b-7b", option, "0", "--device", "cpu")
    assert (code, out) == (1, "") and words in err


def test_every_line_of_a_shape_says_that_it_is_synthetic(
    small_shape: None, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--shape", "any", "--limit", "2", "--max-new-tokens", "8", "--prompt-tokens", "20")
    for simulated in ((), SETTINGS):
        code, out, err = run(capsys, *argv, *simulated, "--device", "cpu")
        assert code == 0, err
        lines = [line for line in (out + err).splitlines() if any(letter.isalnum() for letter in line)]
        assert len(lines) > 15
        assert [line for line in lines if "synthetic" not in line] == []
        assert ("same tokens" in out) == (not simulated), "accepted tokens are made up in a simulation"
        assert ("sticky:0.5, match 0.9, acceptance 0.8" in out) == bool(simulated)


def test_the_json_of_a_shape_holds_its_settings_and_what_was_measured(
    small_shape: None, capsys: pytest.CaptureFixture[str]
) -> None:
    budget = shape_budget(tiny_shape("qwen2_moe"), 6)
    argv = ("--shape", "any", "--limit", "3", "--max-new-tokens", "30", "--prompt-tokens", "20",
            "--vram-budget", str(budget))  # fmt: skip
    code, out, _ = run(
        capsys, *argv, *SETTINGS, "--policy", "moe-speq", "--draft-lengths", "0,3", "--device", "cpu",
        "--json",
    )  # fmt: skip
    report = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert report["synthetic"] == {"routing": "sticky:0.5", "acceptance": 0.8, "match": 0.9, "seed": 0}
    assert "synthetic" in report["model"] and report["identical_tokens"] is None
    plain, drafted = report["rows"]
    for row in (plain, drafted):
        assert row["prompts"] == 3 and row["new_tokens"] == 90
        assert row["verify_s_per_step"] > 0 and row["tokens_per_s"] > 0 and row["h2d_bytes_per_token"] > 0
        assert row["h2d_bytes_per_s"] == pytest.approx(row["h2d_bytes_per_token"] * row["tokens_per_s"])
    assert plain["steps"] == 87 and plain["draft_s_per_step"] == 0 and plain["acceptance_rate"] is None
    assert drafted["steps"] < 60 and drafted["draft_s_per_step"] > 0
    assert drafted["acceptance_rate"] > 0.4 and drafted["expert_match_rate"] == pytest.approx(0.9, abs=0.15)


def test_rows_with_a_draft_are_left_out_where_the_engine_loads_none(
    small_shape: None, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--shape", "any", "--limit", "1", "--max-new-tokens", "6", "--prompt-tokens", "8", *SETTINGS)
    argv += ("--device", "cpu", "--policy", "on-demand")
    _, _, err = run(capsys, *argv, "--vram-budget", "1")
    least = re.search(r"at least (\d+[KM]iB)", err)
    assert least is not None
    budget = ("--vram-budget", least[1])
    code, out, err = run(capsys, *argv, *budget, "--json")
    assert code == 0 and [row["draft_length"] for row in json.loads(out)["rows"]] == [0, "auto"]
    assert "No draft is loaded (the low-bit draft needs" in err and "--draft-length loads it" in err
    code, _, err = run(capsys, *argv, *budget, "--draft-lengths", "2")
    assert code == 1 and "No draft is loaded" in err and "left out" not in err


def test_a_draft_length_that_is_given_is_measured(
    small_shape: None, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--shape", "any", "--limit", "1", "--max-new-tokens", "4", "--prompt-tokens", "8", *SETTINGS)
    argv += ("--device", "cpu", "--policy", "on-demand", "--json", "--draft-length")
    for given, measured in (("3", [0, 3, "auto"]), ("auto", [0, 4, "auto"])):
        code, out, _ = run(capsys, *argv, given)
        assert code == 0 and [row["draft_length"] for row in json.loads(out)["rows"]] == measured
    code, out, _ = run(capsys, *argv, "3", "--draft-lengths", "0,2")
    assert code == 0 and [row["draft_length"] for row in json.loads(out)["rows"]] == [0, 2]


@pytest.mark.slow
def test_a_model_of_words_has_no_synthetic_settings(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("demo", "--limit", "1", "--max-new-tokens", "4", "--draft-lengths", "2", "--device", "cpu")
    code, out, err = run(capsys, *argv, "--json")
    assert code == 0 and json.loads(out)["synthetic"] is None
    code, out, err = run(capsys, *argv)
    assert code == 0 and "synthetic" not in out + err
