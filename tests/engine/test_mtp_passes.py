"""The MTP layer in whole passes, in Triton's interpreter: behind windows and longer passes of prompts, for
models with recurrent layers too, it drafts what the target chooses where both agree, and changes no token."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.test_packed_experts import as_on_a_gpu
from support.mtp_models import mtp_model

pytest.importorskip("triton")

from localmoe.core.config import EngineConfig, SamplingConfig
from localmoe.core.errors import BudgetError, DraftError, UnsupportedModelError
from localmoe.engine import mtp_drafts, planning
from localmoe.engine.loading import EngineParts, assemble
from localmoe.engine.mtp_drafts import MtpShape, UnaskedLayerError
from localmoe.engine.packing import load_parts
from localmoe.engine.planning import PreparedModel, prepare_model
from localmoe.engine.settings import ComputeSettings
from localmoe.kernels.gpu import lowbit_experts
from localmoe.kernels.lowbit_reference import one_by_one
from localmoe.model import device_prompt_passes
from localmoe.model.device_runner import DeviceRunner
from localmoe.model.device_steps import DeviceSteps
from localmoe.speculative.governor import FixedGovernor
from localmoe.speculative.loop import SpeculativeLoop
from localmoe.speculative.sampling import TokenSampler
from localmoe.speculative.steppers import DeviceStepper

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
CONFIG = EngineConfig(device="cpu", context=160, draft_length=3, drafter="mtp")
LONGEST_WINDOW = 8
TEXT = [(7 * i + i * i) % 240 + 5 for i in range(LONGEST_WINDOW + 1)]


@pytest.fixture
def parts(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EngineParts]:
    """A model of this architecture that drafts with a layer that agrees with it."""
    architecture: str = request.param
    compute = ComputeSettings(torch.device("cpu"), torch.float16)
    monkeypatch.setattr(planning, "choose_compute", lambda *asked: compute)
    monkeypatch.setattr(planning, "why_not_on_device", lambda *asked: "")
    monkeypatch.setattr(DeviceRunner, "prepare", lambda self: self.issue.choice.prepare(torch.zeros(1, 256)))
    monkeypatch.setattr(lowbit_experts, "lowbit_moe", one_by_one)  # which takes long to interpret
    monkeypatch.setattr(device_prompt_passes, "WINDOW", LONGEST_WINDOW)
    recurrent = {"layer_types": ["linear_attention", "full_attention"]} if "qwen" in architecture else {}
    folder = mtp_model(
        tmp_path / "m", architecture, dtype=torch.float16, agrees=True, num_hidden_layers=2, **recurrent
    )
    prepared = prepare_model(str(folder), CONFIG)
    assert prepared.compute.whole_passes and prepared.plan.drafting
    made = assemble(prepared, CONFIG, progress=None, cancel=None)
    yield made
    made.close()


def write(parts: EngineParts, text: list[int], kept: int, length: int, tokens: int) -> tuple[list[int], int]:
    """What follows a text of which so much is there already, and how many of these were drafted."""
    runner, sampler = parts.runner, TokenSampler(SamplingConfig())
    assert isinstance(runner, DeviceRunner)
    runner.sequence.truncate(kept)
    stepper = DeviceStepper(DeviceSteps(runner, SamplingConfig(), 0), frozenset())
    loop = SpeculativeLoop(runner, stepper, FixedGovernor(length), sampler, frozenset(), None)
    results = list(loop.run(text, tokens))
    return [token for result in results for token in result.tokens], sum(r.from_draft for r in results)


@pytest.mark.slow(but=1)
@pytest.mark.interpreted
@pytest.mark.parametrize("parts", ["glm4_moe", "qwen3_next", "deepseek_v3"], indirect=True)
def test_it_drafts_what_the_target_chooses(parts: EngineParts) -> None:
    assert str(parts.other).startswith("its MTP layer")
    plain, _ = write(parts, TEXT, 0, 0, 7)
    answer, drafted = write(parts, TEXT, 0, 2, 7)
    assert answer == plain
    assert drafted == 4  # in two steps behind the prompt's own token, each with one of the target's
    # a turn later: a short prompt behind what is there
    text = [*TEXT, *answer, 77, 30]
    again, drafted = write(parts, text, len(TEXT) + len(answer) - 1, 2, 4)
    assert drafted == 2
    assert again == write(parts, text, 0, 0, 4)[0]


@pytest.mark.interpreted
@pytest.mark.parametrize("parts", ["qwen3_next"], indirect=True)
def test_a_closed_model_lets_go_of_it_whoever_still_refers_to_it(parts: EngineParts) -> None:
    assert isinstance(parts.runner, DeviceRunner) and parts.other is not None
    mtp = parts.runner.passes.mtp
    assert mtp is not None
    modules = mtp._modules
    held = [*modules.layer.model.parameters(), *modules.mode.joined, *modules.target_mode.joined]
    held += [part for layer in [modules.layer.experts._experts] for part in layer.tensors()]
    left = [weakref.ref(tensor) for tensor in held if not tensor.is_meta]
    assert len(left) > 20
    del held, modules
    gc.disable()  # which would be late where memory is short
    try:
        parts.close()
        kept = [tensor.shape for ref in left if (tensor := ref()) is not None]
    finally:
        gc.enable()
    assert not kept
    assert mtp._final._rows is None


@pytest.fixture(scope="module")
def of_many_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model(
        tmp_path_factory.mktemp("layers") / "m", "glm4_moe", dtype=torch.bfloat16, num_hidden_layers=40
    )


def test_it_drafts_unasked_where_experts_keep_their_slots(
    of_many_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp_drafts, "PREFILL_CHUNK", 1)  # what 256 need is much beside so small experts
    folder = of_many_layers
    plan = as_on_a_gpu(folder, monkeypatch, draft_length=0).plan

    def prepare(slots: int, **config: Any) -> PreparedModel:
        budget = plan.total_bytes - plan.slot_bytes * (plan.num_slots - slots)
        return as_on_a_gpu(folder, monkeypatch, budget, **config)

    prepared = prepare(90)
    plain = prepare(90, draft_length=0)
    assert plain.plan.num_slots == 90 and plain.draft_model is None and not plain.plan.drafting
    assert isinstance(prepared.draft_model, MtpShape) and prepared.plan.drafting
    assert 0 < plain.plan.num_slots - prepared.plan.num_slots <= 11
    tight = prepare(60)
    assert isinstance(tight.draft_model, MtpShape) and 45 <= tight.plan.num_slots < 53
    assert prepare(20).draft_model is None, "more than a quarter of the slots would be gone"
    assert prepare(90, drafter="prompt-lookup").draft_model is None
    roomy, asked = as_on_a_gpu(folder, monkeypatch), as_on_a_gpu(folder, monkeypatch, drafter="self")
    assert asked.plan.drafting and asked.draft_model is None, "there is room for the model in INT4"
    assert isinstance(roomy.draft_model, MtpShape) and roomy.plan.draft_bytes < asked.plan.draft_bytes / 10
    for own in ({"draft_bits": 8}, {"drafter": "self"}):  # both are of the latter
        assert as_on_a_gpu(folder, monkeypatch, **own).draft_model is None
    assert not prepare(90, drafter="self").plan.drafting
    with pytest.raises(BudgetError):
        prepare(90, drafter="self", draft_length=3)


def test_it_drafts_as_many_tokens_as_are_asked_for_where_there_is_room_for_it_at_all(
    of_many_layers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mtp_drafts, "PREFILL_CHUNK", 1)
    folder = of_many_layers
    roomy = as_on_a_gpu(folder, monkeypatch, draft_length=3)
    assert isinstance(roomy.draft_model, MtpShape) and roomy.plan.drafting
    plan = as_on_a_gpu(folder, monkeypatch, draft_length=0).plan
    without = plan.total_bytes - plan.slot_bytes * plan.num_slots  # slots apart
    for slots, has_room in ((20, True), (1, False)):
        budget = without + slots * plan.slot_bytes
        if has_room:
            few = as_on_a_gpu(folder, monkeypatch, budget, draft_length=3)
            assert isinstance(few.draft_model, MtpShape) and few.plan.num_slots < 0.75 * slots
        else:
            with pytest.raises(BudgetError):
                as_on_a_gpu(folder, monkeypatch, budget, draft_length=3)


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("parts", ["glm4_moe"], indirect=True)
def test_one_that_nobody_asked_for_is_done_without_where_it_fails(
    parts: EngineParts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = prepare_model(str(tmp_path / "m"), CONFIG)
    unasked = replace(CONFIG, drafter="auto", draft_length="auto")

    def broken(self: DeviceRunner) -> None:
        self.passes.memory.open_pass()
        if self.passes.mtp is not None:
            raise ZeroDivisionError
        assert self.passes.memory._open_passes == 1
        self.passes.memory.abandon_pass()
        self.issue.choice.prepare(torch.zeros(1, 256))

    monkeypatch.setattr(DeviceRunner, "prepare", broken)
    with pytest.raises(UnsupportedModelError, match="GPU kernels"):
        assemble(prepared, CONFIG, progress=None, cancel=None)
    again = prepare_model(str(tmp_path / "m"), CONFIG)
    made = assemble(again, unasked, progress=None, cancel=None)
    assert made.other is None and not made.prepared.plan.drafting and "cannot run" in caplog.text
    assert write(made, TEXT, 0, 0, 3)[0] == write(parts, TEXT, 0, 0, 3)[0]
    made.close()
    caplog.clear()
    damaged = prepare_model(str(tmp_path / "m"), CONFIG)
    monkeypatch.setattr(mtp_drafts, "rounded_experts", nothing_finite)
    with pytest.raises(UnaskedLayerError, match="no numbers"):
        assemble(damaged, unasked, progress=None, cancel=None)
    asked: list[str] = []

    def prepare(config: EngineConfig) -> PreparedModel:
        asked.append(config.drafter)
        by_layer = config.drafter == "auto"
        return prepare_model(str(tmp_path / "m"), CONFIG if by_layer else replace(config, draft_length=0))

    made, config, _ = load_parts(prepare, unasked, progress=None, cancel=None)
    assert asked == ["auto", "self"] and config.drafter == "self" and made.other is None
    assert "without its MTP layer" in caplog.text
    made.close()


def nothing_finite(*arguments: object) -> Any:
    raise DraftError("There are no numbers.")
