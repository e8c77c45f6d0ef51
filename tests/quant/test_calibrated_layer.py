"""One layer's experts calibrated: Hessians, choices and answers against pair-by-pair float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from calibrated_reference import (
    EXPERTS,
    GROUP,
    HELD_OUT_ONLY,
    HIDDEN,
    INTER,
    UNASKED,
    Layer,
    expected_hessian,
    expected_outputs,
    pairs_of,
    random_layer,
    random_tokens,
    relative_error,
)
from torch import Tensor

from localmoe.core.draft_config import GptqSettings
from localmoe.core.errors import DraftError
from localmoe.kernels.codes import CodeMatrix, dequantize, quantize_rtn
from localmoe.quant import calibrated_layer
from localmoe.quant.calibrated_layer import CalibratedLayer, LayerTokens, QuantizedExpert, chunk_bytes

SETTINGS = GptqSettings(bits=3, group_size=GROUP, gate_weighted=False)
ROOMY = 1 << 30
LEAST = chunk_bytes(1, HIDDEN, INTER, GROUP, 4)  # beside the outputs


def quantise(
    layer: Layer, tokens: LayerTokens, settings: GptqSettings = SETTINGS, budget: int = ROOMY
) -> tuple[list[QuantizedExpert], Tensor, int]:
    """The experts, what they answer, and how often `tick` was called."""
    ticks: list[None] = []
    problem = CalibratedLayer(tokens, layer, settings, budget)
    found = list(problem.experts(lambda: ticks.append(None)))
    return found, problem.outputs, len(ticks)


def noting(function: Callable[..., Any], seen: list[Tensor], at: int) -> Callable[..., Any]:
    """The same function, whose argument `at` is noted."""

    def noted(*args: Any, **options: Any) -> Any:
        seen.append(args[at].clone())
        return function(*args, **options)

    return noted


@pytest.fixture
def hessians(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Tensor]]:
    """Those that GPTQ is given and those that judge: gate_up, down, gate_up, ... by chunks."""
    seen: dict[str, list[Tensor]] = {"gptq_quantize": [], "keep_better": []}
    for name, at in (("gptq_quantize", 1), ("keep_better", 2)):
        original = getattr(calibrated_layer, name)

        def noting(
            *args: Any, name: str = name, at: int = at, original: Any = original, **options: Any
        ) -> Any:
            seen[name].append(args[at].clone())
            return original(*args, **options)

        monkeypatch.setattr(calibrated_layer, name, noting)
    return seen


def check_experts(
    layer: Layer,
    tokens: LayerTokens,
    settings: GptqSettings,
    found: list[QuantizedExpert],
    hessians: dict[str, list[Tensor]],
) -> int:
    """Every expert's Hessians and errors are the expected ones, and the better codes were kept; how often
    those were GPTQ's."""
    kept = 0
    for expert, quantised in enumerate(found):
        for part, (weight, matrix) in enumerate(
            ((layer.gate_up(expert), quantised.gate_up), (layer.down(expert), quantised.down))
        ):
            gate_up = quantised.gate_up if part else None
            given = expected_hessian(layer, tokens, settings, expert, gate_up, held_out=False)
            judging = expected_hessian(layer, tokens, settings, expert, gate_up, held_out=True)
            close(hessians["gptq_quantize"][part][expert], given)
            close(hessians["keep_better"][part][expert], judging)
            error = relative_error(weight, dequantize(matrix, torch.float64), judging)
            nearest = quantize_rtn(weight, settings.bits, settings.group_size)
            bound = relative_error(weight, dequantize(nearest, torch.float64), judging)
            assert quantised.errors[part] == pytest.approx(error, rel=1e-3)
            assert quantised.nearest_errors[part] == pytest.approx(bound, rel=1e-3)
            assert error <= bound * (1 + 1e-6)
            kept += not torch.equal(matrix.codes, nearest.codes)
    return kept


def close(found: Tensor, expected: Tensor) -> None:
    assert float((found.double() - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("gate_weighted", [False, True])
@pytest.mark.parametrize("biased", [pytest.param(False, marks=pytest.mark.slow), True])
def test_hessians_errors_and_answers_are_those_of_a_loop_over_pairs(
    gate_weighted: bool, biased: bool, hessians: dict[str, list[Tensor]]
) -> None:
    layer, tokens = random_layer(biased=biased), random_tokens()
    settings = replace(SETTINGS, gate_weighted=gate_weighted)
    asked = [[len(pairs_of(tokens, e, held_out=h)) for h in (False, True)] for e in range(EXPERTS)]
    assert asked[UNASKED] == [0, 0] and asked[HELD_OUT_ONLY][0] == 0 < asked[HELD_OUT_ONLY][1]
    found, outputs, _ = quantise(layer, tokens, settings)
    assert len(found) == EXPERTS
    assert check_experts(layer, tokens, settings, found, hessians) >= 2 * EXPERTS - 2
    matrices = [(dequantize(e.gate_up, torch.float64), dequantize(e.down, torch.float64)) for e in found]
    assert outputs.dtype == torch.float32
    close(outputs, expected_outputs(layer, tokens, matrices))


def test_gate_weights_change_what_is_kept() -> None:
    layer, tokens = random_layer(), random_tokens()
    plain, _, _ = quantise(layer, tokens)
    weighted, _, _ = quantise(layer, tokens, replace(SETTINGS, gate_weighted=True))
    for expert in set(range(EXPERTS)) - {UNASKED, HELD_OUT_ONLY}:
        assert not torch.equal(plain[expert].gate_up.codes, weighted[expert].gate_up.codes)
    assert torch.equal(plain[UNASKED].gate_up.codes, weighted[UNASKED].gate_up.codes)


@pytest.mark.parametrize("bits", [2, 4])
def test_on_correlated_inputs_the_kept_codes_are_clearly_better_than_the_nearest(bits: int) -> None:
    found, _, _ = quantise(random_layer(), random_tokens(1200, 300), replace(SETTINGS, bits=bits))
    for expert, quantised in enumerate(found):
        assert quantised.gate_up.bits == bits
        assert quantised.errors[0] < 0.4 * quantised.nearest_errors[0], expert
        assert quantised.errors[1] < 0.7 * quantised.nearest_errors[1], expert


def test_where_gptq_is_worse_on_held_out_tokens_the_nearest_codes_are_kept() -> None:
    """The tokens that judge have nothing in common with those that calibrate."""
    layer, tokens = random_layer(), random_tokens()
    hidden = torch.randn(tokens.hidden.shape, generator=torch.Generator().manual_seed(9))
    hidden[: tokens.num_calibrating, 2:] *= 1e-3
    hidden[tokens.num_calibrating :, :2] *= 1e-3
    found, _, _ = quantise(layer, replace(tokens, hidden=hidden))
    nearest = 0
    for expert, quantised in enumerate(found):
        rounded = quantize_rtn(layer.gate_up(expert), 3, GROUP)
        same = torch.equal(quantised.gate_up.codes, rounded.codes)
        assert same == (quantised.errors[0] == quantised.nearest_errors[0])
        nearest += same
    assert nearest == EXPERTS


def codes(found: list[QuantizedExpert]) -> Tensor:
    return torch.cat([m.codes.flatten() for e in found for m in (e.gate_up, e.down)])


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_experts_in_chunks_have_the_codes_of_all_at_once(at_once: int) -> None:
    layer, tokens = random_layer(biased=True), random_tokens()
    whole, answers, ticks = quantise(layer, tokens)
    budget = chunk_bytes(at_once, HIDDEN, INTER, GROUP, 4) + answers.nbytes
    parts, part_answers, part_ticks = quantise(layer, tokens, budget=budget)
    # before each half of a chunk, and before each expert answers
    assert (ticks, part_ticks) == (2 + EXPERTS, 2 * -(-EXPERTS // at_once) + EXPERTS)
    differing = int((codes(whole) != codes(parts)).sum())  # near ties, which the rows of a product may turn
    assert differing <= codes(whole).numel() // 2000, differing
    close(part_answers, answers.double())


def test_a_budget_too_small_for_one_expert_is_refused_with_the_numbers() -> None:
    layer, tokens = random_layer(), random_tokens()
    outputs = tokens.hidden.numel() * 4
    CalibratedLayer(tokens, layer, SETTINGS, LEAST + outputs)
    for budget, left in ((LEAST + outputs - 1, r"1\d\d\.\d MiB"), (-5, "0 B")):
        with pytest.raises(DraftError, match=rf"needs 1\d\d\.\d MiB of .* leaves {left}: give a") as refusal:
            CalibratedLayer(tokens, layer, SETTINGS, budget)
        assert "\n" not in str(refusal.value) and str(refusal.value).count(". ") == 0


def test_answers_can_be_given_again_from_the_codes() -> None:
    layer, tokens = random_layer(biased=True), random_tokens()
    found, answers, _ = quantise(layer, tokens)
    again = CalibratedLayer(tokens, layer, SETTINGS, ROOMY)
    ticks: list[None] = []
    again.replay(((e.gate_up, e.down) for e in found), lambda: ticks.append(None))
    assert torch.equal(again.outputs, answers) and len(ticks) == EXPERTS


@pytest.mark.parametrize("held_out", [False, True])
def test_down_of_an_unasked_expert_is_calibrated_on_tokens_drawn_by_the_seed(
    held_out: bool, hessians: dict[str, list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrated_layer, "PRIOR_TOKENS", 5)
    layer, tokens = random_layer(), random_tokens()
    seen = []
    for seed in (0, 0, 1):
        found, _, _ = quantise(layer, tokens, replace(SETTINGS, seed=seed))
        seen.append(hessians["keep_better" if held_out else "gptq_quantize"][-1][UNASKED])
        assert rank_of_inputs(seen[-1]) == 5
        check_span(layer, tokens, found[UNASKED].gate_up, seen[-1], held_out)
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])


def rank_of_inputs(hessian: Tensor) -> int:
    values = torch.linalg.eigvalsh(hessian.double())
    return int((values > 1e-6 * values.max()).sum())


def check_span(
    layer: Layer, tokens: LayerTokens, gate_up: CodeMatrix, hessian: Tensor, held_out: bool
) -> None:
    """Just five of the tokens, from the part that they should be of, feed what the Hessian is made of."""
    hidden = tokens.hidden.double()
    inner = layer.activate(UNASKED, hidden @ dequantize(gate_up, torch.float64).T)
    values, vectors = torch.linalg.eigh(hessian.double())
    outside = vectors[:, values <= 1e-6 * values.max()]
    inside = ((inner @ outside).norm(dim=1) < 1e-2 * inner.norm(dim=1)).nonzero().flatten()
    assert len(inside) == 5
    assert all((token >= tokens.num_calibrating) == held_out for token in inside.tolist())


def test_many_tokens_of_one_expert_go_some_rows_at_a_time(
    hessians: dict[str, list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrated_layer, "_ROWS", 7)
    layer, tokens = random_layer(), random_tokens()
    settings = replace(SETTINGS, gate_weighted=True)
    found, outputs, _ = quantise(layer, tokens, settings)
    check_experts(layer, tokens, settings, found, hessians)
    matrices = [(dequantize(e.gate_up, torch.float64), dequantize(e.down, torch.float64)) for e in found]
    close(outputs, expected_outputs(layer, tokens, matrices))


def test_choices_outside_the_layer_ask_nobody() -> None:
    """A router may mark a pair that it dropped."""
    layer, tokens = random_layer(), random_tokens()
    index = tokens.index.clone()
    index[::5, 1] = EXPERTS
    index[1::5, 0] = -1
    found, outputs, _ = quantise(layer, replace(tokens, index=index))
    matrices = [(dequantize(e.gate_up, torch.float64), dequantize(e.down, torch.float64)) for e in found]
    nothing = torch.zeros(2 * INTER, HIDDEN), torch.zeros(HIDDEN, INTER)
    close(outputs, expected_outputs(layer, replace(tokens, index=index), [*matrices, nothing]))


def test_a_tick_may_stop_the_work() -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(CalibratedLayer(random_tokens(), random_layer(), SETTINGS, ROOMY).experts(stop))


def test_16_bit_inputs_give_nearly_the_same_answers() -> None:
    layer, tokens = random_layer(biased=True), random_tokens()
    _, exact, _ = quantise(layer, tokens)
    rough = Layer(layer.gate_ups.bfloat16(), layer.downs.bfloat16(), layer.biases)
    _, answers, _ = quantise(rough, replace(tokens, hidden=tokens.hidden.bfloat16()))
    assert answers.dtype == torch.float32
    assert 0 < float((answers - exact).norm() / exact.norm()) < 0.1


def test_on_a_cpu_pieces_of_work_are_short_whatever_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, tokens = random_layer(), random_tokens()
    monkeypatch.setattr(calibrated_layer, "_CPU_PIECE_FLOPS", 2 * 2 * INTER * HIDDEN**2)
    assert quantise(layer, tokens)[2] == 2 * -(-EXPERTS // 2) + EXPERTS
    monkeypatch.setattr(calibrated_layer, "_CPU_PIECE_FLOPS", 0)
    assert quantise(layer, tokens)[2] == 3 * EXPERTS
