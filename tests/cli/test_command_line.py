"""The `localmoe` command: exit codes, one sentence for each bad input, JSON that is nothing but JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from localmoe.cli.main import main
from localmoe.core.config import USUAL_CONTEXT
from localmoe.engine import Engine
from localmoe.prefetch.registry import POLICIES

STATS_KEYS = {
    "prompt_tokens", "new_tokens", "ttft_s", "tpot_s", "tokens_per_s", "steps", "drafted", "accepted",
    "acceptance_rate", "mean_draft_length", "expert_demands", "hits", "late", "misses", "hit_rate",
    "token_hit_rate", "expert_match_rate", "prefetched", "wasted", "h2d_bytes", "h2d_bytes_per_token",
    "draft_s", "verify_s", "stall_s", "peak_device_bytes", "vram_budget_bytes",
}  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command, in this process."""
    try:
        code = main(argv)
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


LIGHT = """
import sys
from localmoe.cli.main import main
from localmoe.core.config import USUAL_CONTEXT
assert main(sys.argv[1:]) in (0, 1)
heavy = {"torch", "transformers"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.parametrize("argv", [["models"], ["rm", "org/none"], ["pull", "org/none", "--discard"]])
def test_what_only_looks_at_files_starts_without_torch(argv: list[str], tmp_path: Path) -> None:
    env = {**os.environ, "LOCALMOE_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", LIGHT, *argv], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one sentence with which a command is refused (exit code 1, nothing on stdout)."""
    code, out, err = run(capsys, *argv)
    lines = [line for line in err.splitlines() if line.strip()]
    assert (code, out) == (1, ""), err
    assert len(lines) == 1 and lines[0].startswith("localmoe: ") and "Traceback" not in err, err
    return lines[0]


def usage_error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "") and "Traceback" not in err
    return err.splitlines()[-1]


@pytest.fixture(scope="module")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    config = transformers.Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


def test_generate_prints_one_json_object_a_prompt_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "hello"}\n\n{"id": 7, "prompt": "who are you?"}\n')
    code, out, _ = run(
        capsys,
        "generate",
        "demo",
        "--prompts",
        str(prompts),
        "--json",
        "--max-new-tokens",
        "6",
        "--device",
        "cpu",
        "--timeline",
        str(tmp_path / "trace.json"),
    )
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [answer["id"] for answer in answers] == ["a", 7]
    for answer in answers:
        assert set(answer) == {"id", "text", "prompt_token_ids", "token_ids", "finish_reason", "stats"}
        assert set(answer["stats"]) >= STATS_KEYS
        assert len(answer["token_ids"]) == answer["stats"]["new_tokens"] == 6
        assert len(answer["prompt_token_ids"]) == answer["stats"]["prompt_tokens"]
        assert answer["finish_reason"] == "length" and answer["text"]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [event["name"] for event in events if event.get("cat") == "steps"]
    assert len(steps) == 2 + sum(answer["stats"]["steps"] for answer in answers)
    assert steps.count("prompt") == 2 and "hello" not in json.dumps(events)


def test_what_ran_until_ctrl_c_is_on_the_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, stream = tmp_path / "trace.json", Engine.stream

    def interrupted(self: Engine, *given: Any, **more: Any) -> Iterator[Any]:
        with closing(stream(self, *given, **more)) as events:
            yield from islice(events, 4)
            raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "stream", interrupted)
    argv = ("generate", "demo", "--prompt", "hello", "--draft-length", "0", "--device", "cpu")
    code, _, err = run(capsys, *argv, "--timeline", str(path))
    assert code == 130 and "Traceback" not in err
    events = json.loads(path.read_text())["traceEvents"]
    assert [one["name"] for one in events if one.get("cat") == "steps"][:2] == ["prompt", "step 1"]


def test_raw_prompts_are_not_wrapped_in_the_chat_template(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("generate", "demo", "--prompt", "hello", "--json", "--max-new-tokens", "1", "--device", "cpu")
    wrapped = json.loads(run(capsys, *argv)[1])
    raw = json.loads(run(capsys, *argv, "--raw")[1])
    assert 0 < len(raw["prompt_token_ids"]) < len(wrapped["prompt_token_ids"])


def test_answers_are_json_of_the_schema_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schema.json"
    path.write_text('\ufeff{"enum": ["yes", "no"]}', encoding="utf-8")
    asked = ("generate", "demo", "--prompt", "Is it day?", "--device", "cpu", "--json-schema", str(path))
    code, out, err = run(capsys, *asked)
    assert (code, json.loads(out) in ("yes", "no")) == (0, True), err
    for text, words in (
        ("", f"{path}: The schema of the answer is no JSON"), ("{", "no JSON"),
        ("[]", "has to be a JSON object"),
        ('{"a":' * 100_000, "nested too deep"), ('{"type": 3}', "No answer can be held to this schema"),
    ):  # fmt: skip
        path.write_text(text)
        assert words in refused(capsys, *asked)
    path.write_bytes(b"\xff\xff")
    assert f"The schema in {path} cannot be read (it is no text in UTF-8)" in refused(capsys, *asked)
    path.unlink()
    assert "(No such file or directory)" in refused(capsys, *asked)


def test_as_a_process_stdout_is_json_alone_and_the_exit_code_zero(tmp_path: Path) -> None:
    environment = {**os.environ, "LOCALMOE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "localmoe", "generate", "demo", "--prompt", "hello", "--json"]
    done = subprocess.run(
        [*command, "--max-new-tokens", "2"], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stats"]["new_tokens"] == 2 and done.stdout.count("\n") == 1


@pytest.mark.parametrize("command", [("hw",), ("models",), ("plan", "demo")])
def test_reports_print_one_json_value(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *command, "--json")
    assert code == 0 and json.loads(out) is not None
    code, out, _ = run(capsys, *command)
    assert code == 0 and out.strip()


def test_plan_divides_no_more_than_the_budget_and_labels_predictions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, "plan", "demo", "--vram-budget", "60MiB", "--device", "cpu", "--json")
    report = json.loads(out)
    assert code == 0 and report["plan"]["total_bytes"] <= 60 << 20
    assert 0 < report["plan"]["resident_share"] < 1
    assert "predicted" in report


def test_bench_compares_settings_and_says_whether_tokens_agree(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (
        "bench",
        "demo",
        "--limit",
        "1",
        "--max-new-tokens",
        "8",
        "--draft-lengths",
        "0,2",
        "--device",
        "cpu",
    )
    code, out, _ = run(capsys, *argv, "--json")
    report = json.loads(out)
    assert code == 0 and report["identical_tokens"] is True
    assert [(row["policy"], row["draft_length"]) for row in report["rows"]] == [
        (policy, length) for policy in POLICIES for length in (0, 2)
    ]
    plain, drafted = report["rows"][:2]
    assert plain["acceptance_rate"] is None and 0 <= drafted["acceptance_rate"] <= 1
    assert plain["mean_draft_length"] == 0 < drafted["mean_draft_length"] <= 2
    assert plain["left_out_rate"] is None and drafted["left_out_rate"] == 0


def test_what_is_no_model_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for model in (str(tmp_path / "empty"), str(tmp_path / "absent"), "no-such/repo", "../../etc"):
        refused(capsys, "generate", model, "--prompt", "hello")
        refused(capsys, "plan", model)


def test_a_dense_model_is_refused(dense_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "dense" in refused(capsys, "generate", str(dense_model), "--prompt", "hello")


def test_a_truncated_weight_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = Path(__file__).resolve().parents[2] / "assets" / "demo-moe"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((demo / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((demo / "model.safetensors").read_bytes()[:-1000])
    assert "model.safetensors" in refused(capsys, "generate", str(tmp_path), "--prompt", "hello")


def test_a_weight_file_of_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = Path(__file__).resolve().parents[2] / "assets" / "demo-moe"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((demo / name).read_bytes())
    save_file({"model.norm.weight": torch.ones(256, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    assert "missing" in refused(capsys, "generate", str(tmp_path), "--prompt", "hello")


def test_a_budget_too_small_is_refused_with_one_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refused(
        capsys, "generate", "demo", "--prompt", "hello", "--vram-budget", "10MiB", "--device", "cpu"
    )
    enough = sentence.split("at least ")[1].split(",")[0].split(";")[0].rstrip(".")
    argv = (
        "generate",
        "demo",
        "--prompt",
        "hello",
        "--vram-budget",
        enough,
        "--max-new-tokens",
        "2",
        "--json",
    )
    code, out, err = run(capsys, *argv, "--device", "cpu")
    assert code == 0, err
    stats = json.loads(out)["stats"]
    assert stats["peak_device_bytes"] <= stats["vram_budget_bytes"]


def test_a_prompt_longer_than_the_context_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refused(
        capsys, "generate", "demo", "--prompt", "word " * 400, "--context", "64", "--device", "cpu"
    )
    assert "context" in sentence and "64" in sentence


@pytest.mark.parametrize(
    "option",
    [
        ("--draft-length", "-1"), ("--draft-length", "65"), ("--draft-length", "many"),
        ("--vram-budget", "lots"),
        ("--vram-budget", "-5GiB"), ("--emulated-link", "fast"), ("--emulated-link", "12"),
        ("--emulated-link", "60Gb/s"), ("--prompt-cache", "much"), ("--prompt-cache", "-1"),
        ("--device", "tpu"), ("--dtype", "int4"), ("--nonsense", "1"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_read_are_usage_errors(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert usage_error(capsys, "generate", "demo", "--prompt", "hello", *option)


@pytest.mark.parametrize(
    "option",
    [
        ("--temperature", "nan"), ("--temperature", "-1"), ("--top-p", "0"), ("--top-p", "1.5"),
        ("--min-p", "2"),
        ("--top-k", "-3"), ("--repetition-penalty", "0"), ("--seed", "-1"), ("--max-new-tokens", "0"),
        ("--context", "3"), ("--context", "9999999"), ("--policy", "magic"),
        ("--timeline", "no/such/folder/trace.json"),
        ("--timeline", "a" * 250),
    ],
)  # fmt: skip
def test_values_out_of_range_get_one_sentence(
    option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    refused(capsys, "generate", "demo", "--prompt", "hello", *option)


@pytest.mark.parametrize(
    "content", ["", "not json\n", '{"id": "a"}\n', '["a"]\n', '{"id": "a", "prompt": 3}\n']
)
def test_a_prompts_file_that_is_none_gets_one_sentence(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    assert str(path) in refused(capsys, "generate", "demo", "--prompts", str(path))


def test_a_prompt_that_cannot_be_used_is_named_and_the_others_are_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    texts = {"first": "hello", "odd": "a\ud800b", "long": "word " * 400, "last": "who are you?"}
    path.write_text("".join(json.dumps({"id": key, "prompt": texts[key]}) + "\n" for key in texts))
    argv = ("generate", "demo", "--prompts", str(path), "--max-new-tokens", "2", "--context", "64")
    code, out, err = run(capsys, *argv, "--device", "cpu")
    said = [line for line in err.splitlines() if line.startswith("localmoe: ")]
    assert code == 1 and "Traceback" not in err
    assert [line for line in out.splitlines() if line.startswith("== ")] == ["== first", "== last"]
    assert "Prompt 'odd': The prompt holds '\\ud800', which is no valid Unicode" in said[0]
    assert "Prompt 'long': The prompt has" in said[1]
    assert said[2:] == ["localmoe: 2 of 4 prompts could not be answered: see above."]


def test_bench_names_a_prompt_that_cannot_be_used_and_measures_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, options = tmp_path / "prompts.jsonl", ("--max-new-tokens", "2", "--context", "64")
    setting = ("--policy", "on-demand", "--draft-lengths", "0", "--draft-length", "0", "--device", "cpu")
    lines = [json.dumps({"id": key, "prompt": "word " * count}) for key, count in (("a", 1), ("long", 400))]
    path.write_text("\n".join(lines))
    code, out, err = run(capsys, "bench", "demo", "--json", "--prompts", str(path), *options, *setting)
    said = [line for line in err.splitlines() if line.startswith("localmoe: ")]
    assert (code, json.loads(out)["rows"][0]["prompts"]) == (1, 1)
    assert "Prompt 'long': The prompt has" in said[0] and "the context holds 64" in said[0]
    assert said[1:] == ["localmoe: 1 of 2 prompts could not be measured: see above."]
    path.write_text(lines[1])
    code, out, err = run(capsys, "bench", "demo", "--prompts", str(path), *options, *setting)
    assert (code, out) == (1, "") and "1 of 1 prompts could not be measured" in err


def test_a_prompt_that_is_no_unicode_gets_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = refused(capsys, "generate", "demo", "--prompt", "a\udcffb", "--device", "cpu")
    assert "no valid Unicode" in sentence


def test_a_file_in_the_place_of_a_model_is_refused_as_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, words in (
        ("model.GGUF", "is a GGUF file"),
        ("model.safetensors", "is a file: give"),
    ):
        (tmp_path / name).write_bytes(b"")
        for argv in (("plan",), ("rm",), ("generate", "--prompt", "x"), ("plan", "demo", "--draft-model")):
            assert words in refused(capsys, *argv, str(tmp_path / name))


def test_an_unknown_command_lists_those_that_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("frob", "bench-tables"):
        listed = usage_error(capsys, word).partition("choose from")[2]
        assert "generate" in listed and "bench-tables" not in listed


def test_help_names_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    defaults = {
        "--context": f"default: {USUAL_CONTEXT}, or the model's own limit",
        "--draft-length": "default: auto",
        "--draft-bits": "default: 4",
        "--vram-budget": "default: what is free",
    }
    answers = {**defaults, "--policy": "default: moe-speq"}
    for command, named in (
        ("plan", defaults),
        ("serve", answers),
        ("generate", {**answers, "--max-new-tokens": "default: 512"}),
        ("simulate", {"--context": f"default: {USUAL_CONTEXT}", "--max-new-tokens": "default: 128"}),
    ):
        code, out, _ = run(capsys, command, "--help")
        options = " ".join(out.partition("\noptions:")[2].split())
        for option, text in named.items():
            told = options.partition(f" {option} ")[2].partition(" --")[0]
            assert code == 0 and text in told, (command, option)


def test_the_embedded_model_cannot_be_deleted(capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, "rm", "demo")
    assert (Path(__file__).resolve().parents[2] / "assets" / "demo-moe" / "model.safetensors").is_file()
