"""`localmoe simulate`: what it prints, and what it refuses in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from localmoe.cli.main import main
from localmoe.core.routing_trace import RoutingTrace

MACHINE = ("--slots", "40", "--link", "1GB/s", "--memory", "20GB/s")
SMALL = ("--answers", "1", "--prompt-tokens", "8", "--max-new-tokens", "12")


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command, in this process."""
    try:
        code = main(("simulate", *argv))
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of the embedded model's shape: two prompts, one token's experts over and over."""
    path = tmp_path_factory.mktemp("trace") / "demo.npz"
    experts = np.tile(np.arange(4, dtype=np.int16), (40, 6, 1))
    RoutingTrace("demo", 16, experts, np.array([0, 20])).write(path)
    return path


def test_every_policy_is_compared_with_the_offline_optimum(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for layers in ((), ("--layer-by-layer",)):
        code, out, _ = run(
            capsys, "--trace", str(trace), "--model", "demo", *MACHINE, *SMALL, *layers,
            "--policy", "on-demand", "--policy", "moe-speq", "--draft-lengths", "0,3", "--json",
        )  # fmt: skip
        found = json.loads(out)
        assert code == 0 and found["predicted"] is True and found["model"] == "demo"
        assert found["machine"]["num_slots"] == 40 and found["machine"]["whole_passes"] == (not layers)
        assert [(row["policy"], row["draft_length"]) for row in found["rows"]] == [
            ("on-demand", 0), ("moe-speq", 0), ("on-demand", 3), ("moe-speq", 3)
        ]  # fmt: skip
        for row in found["rows"]:  # the prompt brought the only experts that are ever used
            assert row["best_reuse_rate"] == 1.0 and 0.9 <= row["hit_rate"] <= 1.0
            assert row["share_of_best"] == row["reuse_rate"] <= 1.0 and row["tokens_per_s"] > 0
    assert found["synthetic"] == {
        "routing": f"trace:{trace}", "acceptance": 0.9, "match": 0.9, "seed": 0
    }  # fmt: skip


def test_a_card_says_how_many_slots_there_are_and_whether_a_draft_fits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ("--routing", "sticky:0.5", "--shape", "mixtral-8x7b", "--card", "rtx-4090", *SMALL)
    code, out, err = run(capsys, *argv, "--policy", "on-demand")
    assert code == 0 and "No drafting: the low-bit draft needs" in err
    assert "on-demand, 0" in out and "on-demand, 4" not in out
    assert all(line.startswith("predicted: ") for line in out.splitlines()[:3]), "nothing here was measured"
    code, _, err = run(capsys, *argv, "--draft-lengths", "4")
    assert code == 1 and "--drafter prompt-lookup" in err and "Traceback" not in err
    code, out, _ = run(
        capsys, *argv, "--draft-lengths", "4", "--drafter", "prompt-lookup", "--policy", "moe-speq", "--json"
    )
    found = json.loads(out)
    assert code == 0 and found["machine"]["draft_token_s"] == 0.0 and found["rows"][0]["hit_rate"] > 0.1
    assert found["rows"][0]["prefetched_per_token"] == 0.0, "such a drafter routes nothing"


def test_the_context_is_the_models_own_where_that_is_shorter(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--routing", "sticky:0.4", "--model", "demo", "--card", "rtx-4090", *SMALL)
    argv = (*argv, "--policy", "on-demand")
    assert run(capsys, *argv)[0] == 0
    code, _, err = run(capsys, *argv, "--context", "1025")
    assert code == 1 and "at most 1024 tokens of context, not 1025: use 1024 or fewer." in err


def test_a_cpu_that_computes_experts_makes_answers_faster(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--routing", "sticky:0.5", "--shape", "qwen1.5-moe-a2.7b", "--card", "rtx-4060", *SMALL)
    argv = (*argv, "--policy", "on-demand", "--draft-lengths", "0")
    found = []
    for cpu in ((), ("--cpu", "30GB/s"), ("--cpu", "90GB/s")):
        code, out, _ = run(capsys, *argv, *cpu, "--json")
        (row,) = json.loads(out)["rows"]
        assert code == 0 and (row["computed_per_token"] > 0) == bool(cpu)
        found.append(row["tokens_per_s"])
    assert found[0] < found[1] < found[2]
    code, out, _ = run(capsys, *argv, "--cpu", "90GB/s")
    assert code == 0 and ", CPU 90" in out


@pytest.mark.parametrize("machine", [("--card", "rtx-4060"), ("--layer-by-layer",)])
def test_a_disk_is_slower_than_ram_by_what_it_gives_and_what_ram_holds(
    machine: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("--routing", "sticky:0.5", "--shape", "qwen1.5-moe-a2.7b", *machine, *SMALL, "--cpu", "40GB/s")
    argv = (*argv, "--policy", "on-demand", "--draft-lengths", "0")
    found = []
    for disk, ram in (("1GB/s", "4GiB"), ("4GB/s", "4GiB"), ("4GB/s", "12GiB"), ("4GB/s", "99GiB")):
        code, out, _ = run(capsys, *argv, "--disk", disk, "--ram-budget", ram, "--json")
        (row,) = json.loads(out)["rows"]
        assert code == 0 and row["disk_bytes_per_token"] > 0
        found.append(row["tokens_per_s"])
    assert found == sorted(found) and found[0] < found[1] < found[2]
    code, out, _ = run(capsys, *argv, "--disk", "4GB/s", "--ram-budget", "4GiB")
    told = " ".join(out.split())
    assert code == 0 and "all on a disk of 4.0 GB/s" in told and "22.6 % of them" in told
    assert ("a computer without a GPU" in told) == (machine == ("--layer-by-layer",))


MIXTRAL = ("--routing", "uniform", "--shape", "mixtral-8x7b")
DISK = ("--disk", "3GB/s", "--ram-budget", "8GiB", "--cpu", "9GB/s")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        ((*MIXTRAL, *MACHINE, *DISK[:2]), 2, "give both, or neither"),
        ((*MIXTRAL, *MACHINE, *DISK[:4]), 2, "give --cpu SPEED too"),
        ((*MIXTRAL, *MACHINE, *DISK, "--layer-by-layer"), 2, "there is no card: leave"),
        ((*MIXTRAL, "--layer-by-layer", *DISK, "--ram-budget", "1GiB"), 1,
         "does not hold the 8 experts of a layer"),
        (
            ("--routing", "uniform", "--shape", "mixtral-8x7b", "--card", "rtx-4090", "--cpu", "9GB/s",
             "--layer-by-layer"), 2, "--cpu is of whole passes",
        ),
        (("--routing", "uniform", "--shape", "mixtral-8x7b"), 2, "either --card NAME, or --slots N"),
        (("--shape", "mixtral-8x7b", *MACHINE), 2, "--trace --routing"),
        (("--routing", "uniform", *MACHINE), 2, "--shape --model"),
        (("--routing", "uniform", "--shape", "x", *MACHINE), 1, "Shape 'x' is unknown: use one of qwen1.5"),
        (("--routing", "uniform", "--shape", "olmoe-1b-7b", "--card", "x"), 1, "use one of rtx-4060"),
        (("--routing", "uniform", "--shape", "olmoe-1b-7b", *MACHINE, "--policy", "x"), 1, "no policy 'x'"),
        (("--routing", "uniform", "--shape", "phi-3.5-moe", "--card", "rtx-4060", "--context",
          "100000"), 1, "is too small"),
        (("--routing", "uniform", "--shape", "olmoe-1b-7b", "--card", "rtx-4090", "--context", "99999"), 1,
         "at most 4096 tokens"),
        (("--routing", "uniform", "--shape", "olmoe-1b-7b", *MACHINE, "--draft-lengths", "auto"), 2,
         "numbers"),
        (("--routing", "uniform", "--shape", "olmoe-1b-7b", *MACHINE, "--slots", "0"), 2, "at least 1"),
        (("--routing", "uniform", "--shape", "olmoe-1b-7b", *MACHINE, "--answers", "x"), 2, "whole number"),
        (("--routing", "uniform", "--shape", "olmoe-1b-7b", *MACHINE, "--match", "2"), 2, "from 0 to 1"),
        (("--routing", "uniform", "--shape", "olmoe-1b-7b", *MACHINE, "--max-new-tokens", "999999999"), 1,
         "answer of 999999999 do not fit the context of 4096: use a smaller --prompt-tokens or "
         "--max-new-tokens."),
        (("--routing", "uniform", "--shape", "mixtral-8x7b", *MACHINE, "--prompt-tokens", "5000"), 1,
         "or a --context of up to 32768."),
        (("--routing", "uniform", "--shape", "olmoe-1b-7b", *MACHINE, "--link", "25"), 2, "names no unit"),
        (("--routing", "uniform", "--shape", "olmoe-1b-7b", *MACHINE, "--cpu", "60Gb/s"), 2, "7.5GB/s"),
        (("--trace", "/nowhere.npz", "--shape", "olmoe-1b-7b", *MACHINE), 1, "cannot be read"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_one_sentence(
    argv: tuple[str, ...], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = run(capsys, *argv)
    assert found == code and words in " ".join(err.split()) and "Traceback" not in err and out == ""


def test_a_trace_of_another_shape_is_refused(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "--trace", str(trace), "--shape", "olmoe-1b-7b", *MACHINE)
    assert code == 1 and "6 MoE layers of 16 experts" in err


@pytest.mark.parametrize(
    ("policies", "left"), [(["on-demand"], ""), (["adapmoe", "moe-speq"], "of adapmoe only the cache")]
)
def test_what_whole_passes_leave_of_a_policy_is_said_of_those_that_are_shown(
    policies: list[str], left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [word for name in policies for word in ("--policy", name)]
    code, out, _ = run(
        capsys, "--shape", "olmoe-1b-7b", "--routing", "sticky:0.5", "--card", "rtx-4060", "--answers", "1",
        "--draft-lengths", "0", *argv,
    )  # fmt: skip
    assert code == 0 and ("Whole passes" in out) == bool(left) and left in out
