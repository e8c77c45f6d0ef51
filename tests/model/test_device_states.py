"""Recurrent layers in whole passes: logits are transformers' own, a token's bits do not depend on what was
verified with it or dropped, and the text can go back to before an answer. In Triton's interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny_models import STATEFUL_ARCHITECTURES, tiny_model, write_model
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

pytest.importorskip("triton")

from localmoe.core.config import EngineConfig
from localmoe.core.types import Phase
from localmoe.engine.loading import assemble
from localmoe.engine.planning import prepare_model
from localmoe.engine.settings import ComputeSettings
from localmoe.hardware.needs import PASS_PADDING
from localmoe.model import device_cache, device_prompt_passes, device_states, prompt_ways
from localmoe.model.device_cache import DeviceKVCache
from localmoe.model.device_recurrence import run_recurrent
from localmoe.model.device_runner import DeviceRunner
from localmoe.model.device_window import DeviceWindow
from localmoe.model.recurrent_nets import keeps_known_state, recurrent_nets
from localmoe.model.skeleton import RECURRENT_LAYER_TYPES, skeleton_from_config

pytestmark = [pytest.mark.interpreted, pytest.mark.filterwarnings("ignore:overflow encountered in exp")]
_CHANNELS = {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["sparse", "sparse"]}
TWO_LAYERS = {
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["mamba", "full_attention"]},
    "hybrid nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "moe"]},
    "kimi_linear": _CHANNELS,
    "bailing_hybrid": _CHANNELS,
}
LONGEST_WINDOW, BEFORE_THE_END = 8, 6  # tokens, here: rows take long in the interpreter
PROMPT = LONGEST_WINDOW + 6  # tokens; the state is kept some before their end
MEASURED = 40  # tokens


@pytest.fixture(scope="module", params=STATEFUL_ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> Any:
    kinds = TWO_LAYERS.get(request.param, {"layer_types": ["linear_attention", "full_attention"]})
    return tiny_model(request.param, dtype=torch.float16, num_hidden_layers=2, **kinds)


@pytest.fixture(scope="module")
def runner(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceRunner]:
    folder: Path = write_model(tmp_path_factory.mktemp("stateful") / "tiny", model)
    config = EngineConfig(device="cpu", context=160, draft_length=0)
    prepared = prepare_model(str(folder), config)
    compute = ComputeSettings(torch.device("cpu"), torch.float16, whole_passes=True)
    prepared = replace(prepared, skeleton=prepared.source.skeleton(torch.float16), compute=compute)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceRunner, "prepare", lambda self: None)  # all kinds of passes take minutes here
        parts = assemble(prepared, config, progress=None, cancel=None)
    assert isinstance(parts.runner, DeviceRunner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_prompt_passes, "WINDOW", LONGEST_WINDOW)
        patch.setattr(device_cache, "BEFORE_THE_END", BEFORE_THE_END)
        patch.setattr(prompt_ways, "BEFORE_THE_END", BEFORE_THE_END)
        yield parts.runner
    parts.close()


def close(got: Tensor, wanted: Tensor) -> bool:
    return bool((got - wanted).norm() <= 0.02 * wanted.norm())


def run(runner: DeviceRunner, tokens: Sequence[int], phase: Phase = "verify") -> Tensor:
    return runner.run(tokens, phase, last_only=phase == "prefill")


@pytest.mark.slow(but=1)
def test_tokens_can_be_dropped_again(model: Any, runner: DeviceRunner) -> None:
    tokens = [17, 99, 140, 31, 8, 230, 45, 61, 76, 120]
    with torch.inference_mode():
        wanted = model.float()(torch.tensor([tokens])).logits[0]
    sequence = runner.sequence
    sequence.truncate(0)
    assert close(run(runner, tokens[:4], "prefill")[0], wanted[3])
    window = run(runner, [*tokens[4:6], 9, 9])
    assert close(window[:2], wanted[4:6])
    assert [sequence.keepable(length) for length in (99, 8, 6, 4, 3)] == [8, 8, 6, 4, 0]
    sequence.truncate(5)
    assert torch.equal(run(runner, tokens[5:6])[0], window[1])
    assert close(run(runner, tokens[6:9]), wanted[6:9])  # of an odd number: rows are padded
    assert close(run(runner, tokens[9:], "prefill")[0], wanted[9])
    assert sequence.keepable(9) == 9, "where the last part of the prompt began"
    runner.rewind(9)  # a pass broke off, and may have moved the state of some layers
    assert sequence.length == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3_next", "hybrid nemotron_h"], indirect=True)
def test_a_text_goes_back_to_before_the_end_of_its_prompt(model: Any, runner: DeviceRunner) -> None:
    tokens = torch.randint(6, 250, (PROMPT + 2,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.inference_mode():
        wanted = model.float()(torch.tensor([tokens])).logits[0]
    sequence = runner.sequence
    sequence.truncate(0)
    assert close(run(runner, tokens[:PROMPT], "prefill")[0], wanted[PROMPT - 1])
    assert close(run(runner, tokens[PROMPT:]), wanted[PROMPT:])
    kept = sequence.keepable(PROMPT - 1)
    assert 0 < kept < PROMPT, "the prompt's last tokens may be others in the next turn"
    assert sequence.keepable(PROMPT) == PROMPT and sequence.keepable(kept - 1) == 0
    backs = []
    for _ in range(2):
        sequence.truncate(kept)
        backs.append(run(runner, tokens[kept : kept + 4]))
        assert close(backs[-1], wanted[kept : kept + 4])
        run(runner, tokens[kept + 4 : kept + 5])
    assert torch.equal(*backs)
    sequence.truncate(0)
    assert sequence.keepable(PROMPT) == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3_next", "lfm2_moe"], indirect=True)
def test_a_text_that_was_left_goes_on_as_if_nobody_had_left(runner: DeviceRunner) -> None:
    tokens = torch.randint(6, 250, (PROMPT + 9,), generator=torch.Generator().manual_seed(4)).tolist()
    sequence, ends = runner.sequence, []
    for leaves in (False, True):
        sequence.truncate(0)
        run(runner, tokens[:PROMPT], "prefill")
        run(runner, tokens[PROMPT : PROMPT + 4])
        sequence.truncate(PROMPT + 3)  # in a window, whose rows the next pass goes through first
        if leaves:
            lengths = range(sequence.length + 2)
            ways = [sequence.keepable(length) for length in lengths]
            kept = sequence.copy_out()
            assert kept.num_bytes <= sequence.copy_bytes + 1000 and kept.length == sequence.length
            sequence.truncate(0)
            run(runner, [9, 8, 7, 6, 5], "prefill")
            run(runner, [4, 3, 2])
            sequence.bring_back(kept)
            assert [sequence.keepable(length) for length in lengths] == ways
            assert [kept.keepable(length) for length in lengths] == ways
        ends.append(run(runner, tokens[sequence.length :]))
        back = sequence.keepable(PROMPT - 1)
        assert back
        sequence.truncate(back)
        ends.append(run(runner, tokens[back : back + 4]))
    assert torch.equal(ends[0], ends[2]) and torch.equal(ends[1], ends[3])


@pytest.mark.slow(but=2)
def test_the_planner_knows_what_the_state_takes(runner: DeviceRunner) -> None:
    states = runner.sequence.states
    assert states is not None
    runner.run([7], "verify", last_only=True)
    planned = states.shape.layer_bytes(PASS_PADDING, 2)
    assert 0.85 * planned <= states.num_bytes <= planned


@pytest.mark.parametrize("architecture", STATEFUL_ARCHITECTURES)
def test_the_layers_are_recognised_and_nothing_else_is(architecture: str) -> None:
    made = skeleton_from_config(tiny_model(architecture).config, torch.bfloat16, "tiny")
    state = torch.random.get_rng_state()
    kinds = enumerate(made.text_config.layer_types)
    recurrent = [layer for layer, kind in kinds if kind in RECURRENT_LAYER_TYPES]
    assert list(recurrent_nets(made.model)) == recurrent and keeps_known_state(made)
    assert torch.equal(torch.random.get_rng_state(), state), "the trial leaves no trace"
    other = recurrent_nets(made.model)[recurrent[-1]].module
    for part, strange in {
        "activation": "relu",
        "out_proj": torch.nn.Identity(),
        "o_proj": torch.nn.Identity(),
    }.items():
        if hasattr(other, part):
            usual = getattr(other, part)
            delattr(other, part)
            setattr(other, part, strange)
            assert list(recurrent_nets(made.model)) == recurrent[:-1] and not keeps_known_state(made)
            setattr(other, part, usual)
    plain = type(other).forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(other), "forward", lambda *given, **named: 1.01 * plain(*given, **named))
        assert not keeps_known_state(made), "it computes something else"


def test_a_prompts_pass_shorter_than_an_ending_keeps_the_state_of_where_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_cache, "BEFORE_THE_END", 32)
    kept: list[int] = []
    states = SimpleNamespace(
        layers=[0], keep_before=kept.append, begin=lambda kind: None, go_back=lambda position: None
    )
    cache = DeviceKVCache(2, 512, DeviceWindow(8, torch.device("cpu")), states)  # type: ignore[arg-type]
    cache.begin_prompt(0, 50)
    cache.advance(50)
    cache.begin_prompt(50, 10)
    cache.advance(60)
    assert kept == [50 - 32, 0]
    assert cache.keepable(49) == 0, "nothing of before the last pass is kept"
    assert cache.keepable(55) == 50


@pytest.mark.slow(but=1)
def test_a_prompt_needs_no_more_in_a_layer_than_is_planned_for_its_rows(
    model: Any, runner: DeviceRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks: list[int] = []

    def measured(*given: Any) -> Tensor:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            out = run_recurrent(*given)
        events = found.profiler.kineto_results.events()  # type: ignore[union-attr]
        peaks.append(max(itertools.accumulate(one.nbytes() for one in events if one.name() == "[memory]")))
        return out

    monkeypatch.setattr(device_states, "run_recurrent", measured)
    states = runner.sequence.states
    assert states is not None
    runner.sequence.truncate(0)
    run(runner, [9] * MEASURED, "prefill")
    planned = states.shape.row_bytes(2)
    # the interpreter holds on to what a kernel was given until the next ones have run: a norm and a product
    held = 2 * (getattr(states.shape, "values", 0) + model.config.hidden_size)
    assert 0.7 * planned < max(peaks) / MEASURED <= planned + held
