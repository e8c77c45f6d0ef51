"""`localmoe trace`: what it records of the embedded model, and that bench can replay it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from support.shapes import tiny_shape

from localmoe.cli.main import main
from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.prompts import BUNDLED_PROMPTS, read_prompts
from localmoe.core.routing_trace import RoutingTrace
from localmoe.core.types import Message
from localmoe.engine import Engine
from localmoe.engine import engine as engine_module
from localmoe.model.routing_trace import RoutingRecorder


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command, in this process."""
    try:
        code = main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of the first three bundled prompts, six new tokens each."""
    path = tmp_path_factory.mktemp("trace") / "demo.npz"
    assert main(("trace", "demo", "--limit", "3", "--max-new-tokens", "6", "--device", "cpu",
                 "--out", str(path))) == 0  # fmt: skip
    return path


def test_every_token_that_the_target_reads_is_recorded_prompt_by_prompt(recorded: Path) -> None:
    trace = RoutingTrace.read(recorded)
    assert (trace.model, trace.num_experts) == ("demo", 16) and trace.experts.shape[1:] == (6, 4)
    starts = [0]
    with Engine.load("demo", EngineConfig(device="cpu", draft_length=0)) as engine:
        for prompt in read_prompts(BUNDLED_PROMPTS, 3):
            request = GenerationRequest(messages=(Message("user", prompt.text),), max_new_tokens=6)
            stats = list(engine.stream(request))[-1].stats
            starts.append(starts[-1] + stats.prompt_tokens + stats.new_tokens - 1)
    assert trace.starts.tolist() == starts[:-1] and len(trace.experts) == starts[-1]


def test_what_was_recorded_until_ctrl_c_is_kept(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a pass of the second prompt."""
    path, argv = tmp_path / "part.npz", ("trace", "demo", "--limit", "3", "--max-new-tokens", "6")
    whole, record, layers = RoutingTrace.read(recorded), RoutingRecorder.record, []

    def interrupted(self: RoutingRecorder, layer: int, index: torch.Tensor) -> None:
        layers.append(layer)
        record(self, layer, index)
        if self.num_tokens > whole.starts[1] + 3 and layer == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(RoutingRecorder, "record", interrupted)
    code, out, err = run(capsys, *argv, "--device", "cpu", "--out", str(path))
    part = RoutingTrace.read(path)
    kept = len(part.experts)
    assert code == 130 and out == "" and f"{kept} tokens had been recorded: {path}" in err
    assert whole.starts[1] < kept < whole.starts[2] and part.starts.tolist() == whole.starts[:2].tolist()
    assert np.array_equal(part.experts, whole.experts[:kept])
    monkeypatch.setattr(RoutingRecorder, "record", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert run(capsys, *argv, "--device", "cpu", "--out", str(tmp_path / "none.npz"))[0] == 130
    assert not (tmp_path / "none.npz").exists(), "nothing was recorded"


def test_what_was_recorded_is_said_with_the_share_that_repeats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("trace", "demo", "--limit", "2", "--max-new-tokens", "4", "--device", "cpu", "--out")
    code, out, err = run(capsys, *argv, str(tmp_path / "a.npz"), "--json")
    report, trace = json.loads(out), RoutingTrace.read(tmp_path / "a.npz")
    assert code == 0 and "Traceback" not in err
    assert report == {
        "trace": str(tmp_path / "a.npz"), "model": "demo", "prompts": 2, "tokens": len(trace.experts),
        "layers": 6, "experts": 16, "experts_per_token": 4, "repeat_share": trace.repeat_share(),
    }  # fmt: skip
    code, out, _ = run(capsys, *argv, str(tmp_path / "b.npz"))
    assert code == 0 and f"sticky:{trace.repeat_share():.3f}" in out and "25.0 %" in out
    assert f"Recorded {len(trace.experts)} tokens of 2 prompts" in out


def test_prompts_that_cannot_be_used_are_named_and_the_others_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def record(*texts: str) -> tuple[int, str, str]:
        lines = [json.dumps({"id": f"p{number}", "prompt": text}) for number, text in enumerate(texts)]
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("\n".join(lines))
        out = tmp_path / f"{len(texts)}.npz"
        argv = ("--prompts", str(prompts), "--max-new-tokens", "2", "--context", "64", "--device", "cpu")
        return run(capsys, "trace", "demo", *argv, "--out", str(out))

    long = "cat " * 200
    code, out, err = record(long, "Hello", "bad \ud800", "Tell me", long)
    assert code == 1 and "of 2 prompts" in out
    assert "Prompt 'p0': " in err and "Prompt 'p2': " in err and "Prompt 'p4': " in err
    assert err.endswith("localmoe: 3 of 5 prompts could not be recorded: see above.\n")
    trace = RoutingTrace.read(tmp_path / "5.npz")
    first, second = trace.starts.tolist()
    assert first == 0 < second < len(trace.experts)
    code, out, err = record(long)
    assert (code, out) == (1, "") and "1 of 1 prompts" in err and not (tmp_path / "1.npz").exists()


def test_bench_replays_a_recorded_trace(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    same = tiny_shape("qwen2_moe", num_hidden_layers=6, num_experts=16, num_experts_per_tok=4)
    monkeypatch.setattr(engine_module, "find_shape", lambda name: same)
    argv = ("bench", "--shape", "any", "--limit", "1", "--max-new-tokens", "8", "--draft-lengths", "0,3",
            "--device", "cpu")  # fmt: skip
    code, out, err = run(capsys, *argv, "--routing", f"trace:{recorded}", "--synthetic-match", "1", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["synthetic"]["routing"] == f"trace:{recorded}" and report["identical_tokens"] is True
    assert report["rows"][1]["expert_match_rate"] == 1.0


def test_a_trace_of_another_shape_is_refused_before_weights_are_made(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("bench", "--shape", "olmoe-1b-7b", "--routing", f"trace:{recorded}", "--vram-budget", "1MiB")
    code, out, err = run(capsys, *argv, "--device", "cpu")  # the budget would not do either
    assert (code, out) == (1, "")
    assert "6 MoE layers of 16 experts, 4 a token" in err and "16 layers of 64 experts, 8 a token" in err


def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out_path in (tmp_path / "absent" / "a.npz", tmp_path, tmp_path / ("a" * 250), Path(os.devnull)):
        code, out, err = run(capsys, "trace", "demo", "--out", str(out_path))
        lines = [line for line in err.splitlines() if line.strip()]
        assert (code, out) == (1, "") and len(lines) == 1 and str(out_path) in lines[0]


@pytest.mark.parametrize("option", [("--draft-length", "4"), ("--routing", "uniform"), ()])
def test_trace_takes_an_out_file_and_no_drafts(
    option: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    out_file = ("--out", "a.npz") if option else ()
    code, out, err = run(capsys, "trace", "demo", *out_file, *option)
    assert (code, out) == (2, "") and "Traceback" not in err
