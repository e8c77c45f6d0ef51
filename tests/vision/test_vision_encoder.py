"""A model's vision encoder, against transformers' own, and the readers of pictures beside it."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.vision_models import BY_GRID, READING_ARCHITECTURES, picture, vision_model, write_vision_model

from localmoe.core.errors import CheckpointError
from localmoe.core.types import Image
from localmoe.hub.checkpoint import Checkpoint
from localmoe.vision.encoder import streamed
from localmoe.vision.features import KeptFeatures
from localmoe.vision.source import VisionSource, find_vision

CPU = torch.device("cpu")
Reading = tuple[Any, Path]


@pytest.fixture(scope="module", params=READING_ARCHITECTURES)
def reading(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reading:
    model = vision_model(request.param)
    return model, write_vision_model(tmp_path_factory.mktemp("encoder") / request.param, model)


def source_of(folder: Path) -> VisionSource:
    found = find_vision(Checkpoint.open(folder))
    assert isinstance(found, VisionSource)
    return found


@pytest.mark.parametrize("size", [(64, 64), (224, 96)])
def test_it_makes_of_a_picture_what_transformers_does(reading: Reading, size: tuple[int, int]) -> None:
    model, folder = reading
    source, image, reader = source_of(folder), Image(picture(7, *size)), source_of(folder).reader(CPU)
    encoder = source.encoder(torch.float32)
    encoder.read()
    found = encoder.encode(reader.patches(image), CPU)
    with torch.inference_mode():
        wanted = model.model.get_image_features(**reader.patches(image), return_dict=True)
    assert found.shape == (1 + source.kind.depth, reader.count(image), 128)
    assert torch.equal(found[0], torch.cat(wanted.pooler_output))
    for index in range(source.kind.depth):
        assert torch.equal(found[1 + index], torch.cat(wanted.deepstack_features[index]))


def test_it_has_the_encoders_weights_alone(reading: Reading) -> None:
    model, folder = reading
    encoder = source_of(folder).encoder(torch.float32)
    parts = [getattr(model.model, name, None) for name in ("visual", "vision_tower", "embed_vision")]
    own = [one for part in parts if part is not None for one in part.parameters()]
    assert encoder.num_bytes == sum(4 * one.numel() for one in own)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [("missing", "1 weights of what reads pictures are missing"), ("shape", "do not belong together")],
)
def test_damaged_weights_are_refused(reading: Reading, damage: str, sentence: str, tmp_path: Path) -> None:
    folder = write_vision_model(tmp_path / "m", reading[0])
    file = folder / "model.safetensors"
    stored = load_file(file)
    name = next(name for name in stored if "vis" in name and ".0.mlp." in name and name.endswith("weight"))
    if damage == "missing":
        del stored[name]
    else:
        stored[name] = stored[name][:-1].clone()
    save_file(stored, file, metadata={"format": "pt"})
    encoder = source_of(folder).encoder(torch.float32)
    with pytest.raises(CheckpointError, match=sentence):
        encoder.read()


@pytest.mark.parametrize("reading", BY_GRID, indirect=True)
def test_streamed_weights_are_where_they_compute_and_go_back(reading: Reading) -> None:
    """From one device to another one: here to one that keeps no numbers."""
    model, meta = reading[0].model.visual, torch.device("meta")
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    seen: list[bool] = []
    handle = model.blocks[0].mlp.linear_fc1.register_forward_hook(
        lambda module, args, out: seen.append(module.weight.is_meta)
    )
    patches, grid = torch.zeros(16, 1536, device=meta), torch.tensor([[1, 4, 4]])
    with streamed(model, meta):
        assert not model.blocks[0].mlp.linear_fc1.weight.is_meta and model.pos_embed.weight.is_meta
        block = model.blocks[0].mlp(torch.zeros(16, 64, device=meta))
    handle.remove()
    assert block.is_meta and seen == [True] and len(patches) == int(grid.prod())
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    with pytest.raises(RuntimeError, match="stopped"), streamed(model, meta):
        model.blocks[0].mlp.linear_fc1.forward = _stop
        model.blocks[0].mlp(torch.zeros(16, 64, device=meta))
    del model.blocks[0].mlp.linear_fc1.forward
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before


@pytest.mark.parametrize("reading", BY_GRID[:1], indirect=True)
@pytest.mark.parametrize("number", range(8))
def test_weights_go_back_where_the_device_has_no_room_for_one(
    reading: Reading, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that are there throughout, and of a module's first and last."""
    model, meta = reading[0].model.visual, torch.device("meta")
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    move, left = torch.Tensor.to, iter([True] * number)

    def full(tensor: torch.Tensor, *args: object) -> torch.Tensor:
        if not next(left, False):
            raise torch.OutOfMemoryError("no room")
        return move(tensor, *args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", full)
        with pytest.raises(torch.OutOfMemoryError), streamed(model, meta):
            model.blocks[0].mlp(torch.zeros(16, 64, device=meta))
            model.blocks[1].mlp(torch.zeros(16, 64, device=meta))
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def _stop(*given: object) -> None:
    raise RuntimeError("stopped")


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("reading", BY_GRID, indirect=True)
@pytest.mark.parametrize(("device", "most"), [("cpu", 384), ("cuda", 1024)])
def test_a_large_picture_is_scaled_down_and_a_small_one_up(reading: Reading, device: str, most: int) -> None:
    reader = source_of(reading[1]).reader(torch.device(device))
    large = reader.layout(Image(picture(1, 3000, 1500)))
    assert 0.9 * most < large.tokens <= most and 1.8 < large.width / large.height < 2.2
    assert reader.layout(Image(picture(1, 20, 20))).tokens == 4  # 64 x 64 pixels at least
    assert reader.count(Image(picture(1, 96, 64))) == 6


def test_the_processor_makes_the_patches_of_transformers_own(reading: Reading) -> None:
    data = picture(3, 320, 160)
    patches = source_of(reading[1]).reader(CPU).patches(Image(data))
    own = transformers.AutoImageProcessor.from_pretrained(reading[1], backend="pil")
    wanted = own(images=[PIL.Image.open(io.BytesIO(data))], return_tensors="pt")
    assert len(patches) == 2 and all(torch.equal(one, wanted[name]) for name, one in patches.items())


def test_gemmas_pictures_have_as_many_tokens_as_it_says(tmp_path: Path) -> None:
    reader = source_of(write_vision_model(tmp_path / "m", vision_model("gemma4"))).reader(CPU)
    for size in ((20, 20), (300, 100), (1600, 1200)):
        image = Image(picture(1, *size))
        layout, patches = reader.layout(image), reader.patches(image)
        there = int((patches["image_position_ids"] >= 0).all(dim=-1).sum())
        assert 9 * layout.tokens == there and 40 < layout.tokens <= 70


def test_kept_features_are_those_used_last() -> None:
    kept = KeptFeatures(most_bytes=3 * 400)
    features = {bytes([i]): torch.full((1, 10, 10), float(i)) for i in range(4)}
    for digest in (b"\x00", b"\x01", b"\x02"):
        kept.keep(digest, features[digest])
    assert kept.get(b"\x00") is features[b"\x00"]
    kept.keep(b"\x03", features[b"\x03"])
    assert kept.get(b"\x01") is None and kept.num_bytes == 1200
    kept.keep(b"\x04", torch.zeros(1, 100, 100))  # larger than all may be: it is needed now
    assert kept.get(b"\x04") is not None and kept.get(b"\x00") is None


def test_models_that_read_none_have_no_encoder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    config = {"model_type": "qwen3_moe"}
    checkpoint = Checkpoint(tmp_path, config, {}, (), 0, ())
    assert find_vision(checkpoint) is None
