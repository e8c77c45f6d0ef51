"""Building the GPTQ draft of a loaded model: what each layer is calibrated on, progress, stopping, limits."""

from __future__ import annotations

import copy
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gptq_rig import CPU, SETTINGS, TOKENS, Loaded, Seen, built, filled_with_draft, seen
from support.layer_passes import passes
from support.tiny_models import ARCHITECTURES, UNGATED_ARCHITECTURE, tiny_model, write_model
from torch.nn import functional

from localmoe.core.errors import DraftError
from localmoe.core.types import ExpertKey, Progress
from localmoe.engine.drafts import HostExpertSource
from localmoe.kernels.codes import quantize_rtn
from localmoe.model import gptq_build
from localmoe.model.gptq_build import BATCH, StoredLayer, least_build_bytes
from localmoe.quant.builder import DraftCancelledError
from localmoe.quant.draft_checkpoint import DraftCheckpoint

__all__ = ["seen"]
Tiny = Callable[[str], tuple[Path, Any]]


def moe_layers(architecture: str) -> int:
    return 2 if architecture == "deepseek_v2" else 3


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, UNGATED_ARCHITECTURE])
def test_a_layers_plain_matrices_compute_what_transformers_experts_do(architecture: str, tiny: Tiny) -> None:
    folder, reference = tiny(architecture)
    loaded = Loaded.of(folder)
    for layer, experts in enumerate(loaded.skeleton.experts):
        weights = StoredLayer(experts, loaded.store, layer, CPU)
        generator = torch.Generator().manual_seed(layer)
        x = torch.randn(20, 128, generator=generator)
        index = torch.rand(20, 8, generator=generator).topk(2).indices
        router = torch.rand(20, 2, generator=generator)
        found = torch.zeros(20, 128)
        for token, k in itertools.product(range(20), range(2)):
            expert = int(index[token, k])
            inner = weights.activate(expert, functional.linear(x[token, None], weights.gate_up(expert)))
            answer = weights.finish(expert, functional.linear(inner, weights.down(expert)))
            found[token] += router[token, k] * answer[0]
        with torch.inference_mode():
            wanted = reference.get_submodule(experts.path)(x, index, router)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    loaded.store.close()


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss", UNGATED_ARCHITECTURE])
def test_gate_and_up_are_told_apart_and_put_together_again(architecture: str, tiny: Tiny) -> None:
    loaded = Loaded.of(tiny(architecture)[0])
    layer = StoredLayer(loaded.skeleton.experts[1], loaded.store, 1, CPU)
    whole = quantize_rtn(layer.gate_up(5), 3, 32)
    parts = layer.split(whole)
    *plain, down = HostExpertSource(loaded.skeleton, loaded.store).matrices(1, 5)
    assert len(plain) == (1 if architecture == UNGATED_ARCHITECTURE else 2)
    for matrix, weight in zip(parts, plain, strict=True):
        expected = quantize_rtn(weight, 3, 32)
        assert torch.equal(matrix.codes, expected.codes) and torch.equal(matrix.scales, expected.scales)
    joined = layer.join(parts)
    assert torch.equal(joined.codes, whole.codes) and torch.equal(joined.scales, whole.scales)
    assert (joined.bits, joined.group_size, joined.in_features) == (3, 32, 128)
    assert torch.equal(layer.down(5), down)
    loaded.store.close()


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, UNGATED_ARCHITECTURE])
@pytest.mark.slow(but=4)
def test_each_layer_is_calibrated_on_what_the_quantised_layers_before_it_give(
    architecture: str, tiny: Tiny, tmp_path: Path, seen: Seen
) -> None:
    folder, model = tiny(architecture)
    draft = built(folder, tmp_path / "draft")
    reference = copy.deepcopy(model)
    skeleton = Loaded.of(folder).skeleton
    filled_with_draft(reference, skeleton, draft)
    _, _, asked = passes(reference, TOKENS, BATCH)
    assert len(seen.tokens) == moe_layers(architecture)
    for experts, tokens, found in zip(skeleton.experts, seen.tokens, seen.experts, strict=True):
        wanted = asked[experts.path]
        same = (tokens.index.sort(-1).values == wanted.index.sort(-1).values).all(-1)
        assert float(same.float().mean()) > 0.995, "a near tie may turn"
        torch.testing.assert_close(tokens.hidden[same], wanted.hidden[same], rtol=1e-3, atol=1e-3)
        assert tokens.held_out == 40 and tokens.num_calibrating == 600, "one sequence of sixteen judges"
        assert len(found) == 8
    matrices = 2 if architecture == UNGATED_ARCHITECTURE else 3
    assert len(DraftCheckpoint.open(draft)._checkpoint.tensors) == moe_layers(architecture) * 8 * matrices * 4


def test_many_sequences_hold_out_one_of_sixteen(
    tiny: Tiny, tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gptq_rig.TOKENS", TOKENS[:, :16].repeat(3, 1))
    built(tiny("mixtral")[0], tmp_path / "draft")
    assert {(tokens.held_out, len(tokens.hidden)) for tokens in seen.tokens} == {(3 * 16, 48 * 16)}


def test_progress_counts_experts_says_how_long_it_will_take_and_how_good_they_are(
    tiny: Tiny, tmp_path: Path, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0, 2)  # two seconds an expert
    monkeypatch.setattr(gptq_build, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    reports: list[Progress] = []
    built(tiny("deepseek_v2")[0], tmp_path / "draft", progress=reports.append)
    assert [report.done for report in reports] == list(range(1, 17))
    for report in reports:
        assert (report.stage, report.total, report.unit) == ("Building the 4-bit GPTQ draft", 16, "experts")
        assert report.seconds_left == 2 * (16 - report.done)
        layer, last = divmod(report.done - 1, 8)
        experts = seen.experts[layer][: last + 1]
        errors, nearest = (
            sum(sum(e) for e in all_)
            for all_ in zip(*((e.errors, e.nearest_errors) for e in experts), strict=True)
        )
        assert report.detail == f"output error {100 * errors / nearest:.0f} % of rounding to nearest"
        assert int(re.search(r"\d+", report.detail)[0]) < 100  # type: ignore[index]


def stop_at(done: int, cancel: threading.Event) -> Callable[[Progress], None]:
    def report(progress: Progress) -> None:
        if progress.done == done:
            cancel.set()

    return report


def test_a_cancelled_build_ends_at_the_next_piece_of_work_and_keeps_finished_layers(
    tiny: Tiny, tmp_path: Path
) -> None:
    folder, cancel = tiny("olmoe")[0], threading.Event()
    keep = {"keep_on": (DraftCancelledError,)}
    with pytest.raises(DraftCancelledError, match="after 11 of 24 experts; finished layers are kept"):
        built(
            folder,
            tmp_path / "draft",
            progress=stop_at(11, cancel),
            cancel=cancel,
            budget=one_expert(folder),
            **keep,
        )
    loaded = Loaded.of(folder)
    with loaded.writer(tmp_path / "draft", **keep) as writer:
        assert writer.finished_layers == (0,)
    loaded.store.close()


def one_expert(folder: Path) -> int:
    """The budget in which the largest layer's experts are quantised one at a time, and just so."""
    loaded = Loaded.of(folder)
    loaded.store.close()
    return least_build_bytes(loaded.skeleton, SETTINGS, 4) - gptq_build._WORKSPACE_BYTES


def test_a_build_that_is_cancelled_before_it_begins_runs_nothing(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancel = threading.Event()
    cancel.set()
    monkeypatch.setattr(gptq_build, "LayerwiseModel", lambda *args: pytest.fail("the model is run"))
    with pytest.raises(DraftCancelledError, match="after 0 of 24"):
        built(tiny("olmoe")[0], tmp_path / "draft", cancel=cancel)
    assert list(tmp_path.iterdir()) == []


def test_a_build_pauses_between_pieces_of_work_and_may_be_cancelled_meanwhile(
    tiny: Tiny, tmp_path: Path
) -> None:
    folder, pauses = tiny("olmoe")[0], itertools.count(1)
    built(folder, tmp_path / "whole", pause=lambda: next(pauses))
    count = next(pauses) - 1
    assert count >= 3 * (2 * 4 + 2 + 8), "a layer's batches, the halves of a chunk, and each expert"
    for at, done in ((1, 0), (count - 1, 23), (count, 24)):
        cancel, waits = threading.Event(), itertools.count(1)

        def pause(at: int = at, cancel: threading.Event = cancel, waits: Iterator[int] = waits) -> None:
            if next(waits) == at:
                cancel.set()

        with pytest.raises(DraftCancelledError, match=f"cancelled after {done} of 24"):
            built(folder, tmp_path / str(at), pause=pause, cancel=cancel)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, UNGATED_ARCHITECTURE])
def test_the_least_budget_is_enough_and_gives_the_same_draft(
    architecture: str, tiny: Tiny, tmp_path: Path, seen: Seen
) -> None:
    folder = tiny(architecture)[0]
    least = one_expert(folder)
    built(folder, tmp_path / "small", budget=least)
    built(folder, tmp_path / "large")
    small, large = (
        torch.cat([e.gate_up.codes.flatten() for layer in half for e in layer])
        for half in (seen.experts[: len(seen.experts) // 2], seen.experts[len(seen.experts) // 2 :])
    )
    assert int((small != large).sum()) < len(small) // 500, "a near tie may turn, and what follows in its row"
    with pytest.raises(DraftError, match=r"needs .* and the budget leaves .*give a larger budget"):
        built(folder, tmp_path / "none", budget=least // 2)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused_in_one_sentence(
    value: float, tiny: Tiny, tmp_path: Path
) -> None:
    loaded = Loaded.of(tiny("deepseek_v2")[0])
    loaded.store.views(ExpertKey(1, 6))[1][3, 4] = value
    wanted = r"in decoder layer 2, the matrix has a weight that is"
    with pytest.raises(DraftError, match=wanted) as refusal, loaded.writer(tmp_path / "draft") as writer:
        loaded.build().run(writer)
    assert str(refusal.value).startswith("No draft can be built of this model:")
    assert str(refusal.value).endswith("download the model again.") and "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == [], "not even the finished layer stays"
    loaded.store.close()


def test_bfloat16_weights_are_calibrated_in_float32(tmp_path: Path, seen: Seen) -> None:
    folder = write_model(tmp_path / "model", tiny_model("qwen3_moe", dtype=torch.bfloat16))
    built(folder, tmp_path / "draft")
    assert {tokens.hidden.dtype for tokens in seen.tokens} == {torch.float32}
    assert all(sum(e.errors) < sum(e.nearest_errors) for layer in seen.experts for e in layer)


def test_shared_weights_that_are_not_finite_are_refused_at_the_layer_where_it_shows(
    tiny: Tiny, tmp_path: Path
) -> None:
    loaded = Loaded.of(tiny("olmoe")[0])
    layer = loaded.skeleton.model.model.layers[1]
    with torch.no_grad():
        layer.self_attn.o_proj.weight[0, 0] = float("nan")
    wanted = "the experts of decoder layer 1 is not finite; delete the model and download it again"
    with pytest.raises(DraftError, match=wanted), loaded.writer(tmp_path / "draft") as writer:
        loaded.build().run(writer)
    loaded.store.close()
