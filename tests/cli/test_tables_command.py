"""`localmoe bench tables`: measured on the embedded model, resumed, rendered, predicted, and refused in one
sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from localmoe.cli.main import main

SMALL = ("--datasets", "gsm8k", "--limit", "1", "--max-new-tokens", "6", "--device", "cpu")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command, in this process."""
    try:
        code = main(("bench", "tables", *argv))
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_tables_are_measured_kept_and_rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    argv = ("--tables", "4,fig6", *SMALL, "--emulated-link", "1GB/s", "--json", str(path))
    code, out, err = run(capsys, *argv)
    assert code == 0, err
    assert "MoE-SpeQ, table 4" in out and "MoE-SpeQ, figure 6" in out and "tok/s" in out
    assert "5 of 5: " in err and "no copies beside computing, no fused draft kernel" in err
    kept = json.loads(path.read_text(encoding="utf-8"))
    (one,) = kept["runs"]
    assert one["subject"]["link"] == "emulated 1.0 GB/s" and len(one["cells"]) == 5
    assert {key.split(" / ")[3] for key in one["cells"]} == {"54"}
    by_dataset: dict[str, set[str]] = {}
    for key, figures in one["cells"].items():
        by_dataset.setdefault(key.split(" / ")[0], set()).add(figures["tokens_sha256"])
        assert figures["tpot_s"] > 0 and figures["new_tokens"] >= 2
    assert [len(digests) for digests in by_dataset.values()] == [1, 1]
    code, _, err = run(capsys, *argv)
    assert code == 0 and "0 of 5 settings to run" in err
    assert json.loads(path.read_text(encoding="utf-8")) == kept
    page = tmp_path / "page.md"
    assert run(capsys, "--render", str(page), str(path))[0] == 0
    assert "emulated 1.0 GB/s link" in page.read_text(encoding="utf-8")
    charts = {path.name for path in (tmp_path / "charts").iterdir()}
    assert charts >= {"4-demo-cpu.svg", "fig6-demo-cpu.svg"} and "fig14-demo-cpu.svg" not in charts


def test_a_shape_is_predicted_on_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys, "--shape", "olmoe-1b-7b", "--card", "rtx-4060", "--tables", "3,fig13", "--limit", "1",
        "--max-new-tokens", "5", "--prompt-tokens", "4",
    )  # fmt: skip
    assert code == 0 and "predicted: olmoe-1b-7b, synthetic routing, rtx-4060" in err
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if "│" in line}
    assert " ms " in rows["low: moe-speq"]
    for level in ("low", "medium"):  # without the whole window, and with it
        plain, whole = (
            float(rows[f"{level}: speculative{what}"].split("│")[5].strip(" %"))
            for what in ("", ", whole window routed")
        )
        assert whole > plain + 2
    assert "can give." in err and " ms " not in rows["high: moe-speq"], (
        "half of its experts and a draft: 10 GB"
    )
    assert " ms " not in rows["low: moe-speq, draft length auto"]


@pytest.mark.parametrize(
    ("argv", "sentence", "code"),
    [
        (("--tables", "5"), "There is no table '5': choose from 2, 3,", 1),
        (("--datasets", "gpqa"), "There is no dataset 'gpqa'", 1),
        (("--tables", ""), "'' names nothing", 2),
        (("--datasets", " , ", "--tables", "2"), "' , ' names nothing", 2),
        (("--shape", "gpt-5"), "Shape 'gpt-5' is unknown", 1),
        (("--shape", "olmoe-1b-7b", "--card", "h900", "--tables", "3"), "Card 'h900' is unknown", 1),
        (("--card", "rtx-4090"), "add --shape NAME", 2),
        (("--model", "demo", "--shape", "olmoe-1b-7b"), "either --model MODEL or --shape NAME", 2),
        (("--routing", "uniform"), "make sense with --shape only", 2),
        (("--render", "x.md"), "--render needs files of results", 2),
        (("r.json",), "are read with --render PAGE.md only", 2),
        (("--limit", "0"), "0 is out of range: use at least 1", 2),
        (("--render", "x.md", "missing.json"), "There is no file missing.json", 1),
        (("--json", "missing/r.json"), "name a file in a folder that exists", 1),
        (("--json", "x" * 300), "cannot be written (File name too long)", 1),  # as of a folder of others
        (("--render", "x.md", "x" * 300), "cannot be read: File name too long", 1),
        (("--render", "x.md", "."), "The results . cannot be read: ", 1),
        (("--model", "nobody/nothing", "--tables", "fig6"), "nobody/nothing", 1),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(
    argv: tuple[str, ...], sentence: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = run(capsys, *argv)
    assert (found, out) == (code, "") and sentence in err and "Traceback" not in err
