"""Running a model layer by layer: bit for bit what transformers computes, and what its experts are asked."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.layer_passes import passes
from support.tiny_models import ARCHITECTURES

from localmoe.hub.checkpoint import Checkpoint
from localmoe.model.layerwise import LayerwiseModel
from localmoe.model.loader import load_weights
from localmoe.model.skeleton import ExpertsModule, build_skeleton

Tiny = Callable[[str], tuple[Path, Any]]
CPU = torch.device("cpu")
TOKENS = torch.randint(6, 250, (6, 40), generator=torch.Generator().manual_seed(0))


def layerwise(folder: Path) -> tuple[LayerwiseModel, dict[int, ExpertsModule]]:
    """A model folder ready to run by layers, and its experts by decoder layer."""
    checkpoint = Checkpoint.open(folder)
    skeleton = build_skeleton(checkpoint, torch.float32)
    load_weights(skeleton, checkpoint, device=CPU).close()
    return LayerwiseModel(skeleton, CPU), {experts.decoder_layer: experts for experts in skeleton.experts}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("batch", [2, 3])
def test_with_the_models_own_experts_every_layer_gives_transformers_bits(
    architecture: str, batch: int, tiny: Tiny
) -> None:
    folder, reference = tiny(architecture)
    wanted, final, asked = passes(reference, TOKENS, batch)
    model, experts = layerwise(folder)
    assert model.num_layers == len(wanted) == 3
    hidden = model.embed(TOKENS, batch)
    assert [part.shape for part in hidden] == [(batch, 40, 128)] * (6 // batch)
    for layer in range(model.num_layers):
        routed = model.routed(layer, hidden)
        assert (routed is None) == (architecture == "deepseek_v2" and layer == 0)
        outputs = None
        if routed is not None:
            path = experts[layer].path
            for name in ("hidden", "index", "weights"):
                assert torch.equal(getattr(routed, name), getattr(asked[path], name)), (layer, name)
            assert routed.hidden.shape == (240, 128)
            with torch.inference_mode():  # batch by batch, as a matrix library's bits depend on the rows
                rows = batch * 40
                outputs = torch.cat([
                    reference.get_submodule(path)(*part)
                    for part in zip(routed.hidden.split(rows), routed.index.split(rows),
                                    routed.weights.split(rows), strict=True)
                ])  # fmt: skip
        model.advance(layer, hidden, outputs)
        assert torch.equal(torch.cat(hidden), wanted[layer]), layer
    with torch.inference_mode():
        norm = model._model.base_model.norm
        assert all(torch.equal(norm(part), whole) for part, whole in zip(hidden, final, strict=True))


def test_other_answers_of_the_experts_change_what_leaves_the_layer_by_just_that(tiny: Tiny) -> None:
    """mixtral adds its experts' answer to the residual and nothing else, token by token."""
    model, _ = layerwise(tiny("mixtral")[0])
    hidden = model.embed(TOKENS, 2)
    entering = copy.deepcopy(hidden)
    nothing = torch.zeros(240, 128)
    some = torch.randn(240, 128, generator=torch.Generator().manual_seed(1))
    model.advance(0, hidden, nothing)
    model.advance(0, entering, some)
    difference = (torch.cat(entering) - torch.cat(hidden)).flatten(0, 1)
    torch.testing.assert_close(difference, some, rtol=1e-5, atol=1e-5)


def test_asking_what_is_routed_changes_nothing_and_may_be_asked_again(tiny: Tiny) -> None:
    model, _ = layerwise(tiny("qwen2_moe")[0])
    hidden = model.embed(TOKENS, 3)
    before = copy.deepcopy(hidden)
    first, second = model.routed(0, hidden), model.routed(0, hidden)
    assert first is not None and second is not None
    assert torch.equal(first.hidden, second.hidden) and torch.equal(first.index, second.index)
    assert all(torch.equal(a, b) for a, b in zip(before, hidden, strict=True))
    model.advance(0, hidden, torch.zeros(240, 128))
    third = model.routed(0, hidden)
    assert third is not None and third.hidden.shape == (240, 128), "the answers are given once"
    assert not torch.equal(third.hidden, first.hidden)


def test_a_layers_bytes_are_those_of_its_shared_weights(tiny: Tiny) -> None:
    folder, reference = tiny("deepseek_v2")
    model, _ = layerwise(folder)
    for layer, module in enumerate(reference.model.layers):
        state = module.state_dict()
        shared = sum(t.nbytes for name, t in state.items() if ".experts." not in name)
        assert model.layer_bytes(layer) == shared
    assert model.layer_bytes(0) != model.layer_bytes(1)


def test_batches_that_would_be_called_differently_are_a_mistake_of_the_caller(tiny: Tiny) -> None:
    model, _ = layerwise(tiny("qwen2_moe")[0])
    with pytest.raises(AssertionError):
        model.embed(TOKENS, 4)
    hidden = model.embed(TOKENS, 2)
    with pytest.raises(AssertionError):
        model.advance(0, hidden, None)
