"""Settings by which pictures are read that are damaged, or not the model's: pictures alone are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.vision_models import picture, vision_model, write_vision_model

from localmoe.core.errors import ConfigError, UnsupportedModelError
from localmoe.core.types import Image
from localmoe.hub.checkpoint import Checkpoint
from localmoe.vision.source import NoProcessor, VisionSource, find_vision

CPU = torch.device("cpu")
PATCHES = r"its patches, .* are not those of config\.json"
Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """By architecture."""
    place = tmp_path_factory.mktemp("vision")
    return {name: write_vision_model(place / name, vision_model(name)) for name in ("qwen3_vl_moe", "gemma4")}


def changed(folder: Path, place: Path, file: str, part: str, changes: dict[str, Any]) -> Path:
    """Another folder with a file that says something else; part: of the file, "" is all of it."""
    for one in folder.iterdir():
        (place / one.name).write_bytes(one.read_bytes())
    said = json.loads((folder / file).read_text())
    (said[part] if part else said).update(changes)
    (place / file).write_text(json.dumps(said))
    return place


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patch_size": 14}, PATCHES),
        ({"merge_size": 1}, PATCHES),
        ({"temporal_patch_size": 1}, PATCHES),
        ({"merge_size": 0}, "division by zero"),
        ({"size": {}}, "size must have"),
        ({"image_mean": [0.5]}, "mean must have 3 elements"),
        ({"image_std": [0, 0, 0]}, "no numbers of pixels"),
        ({"image_processor_type": "CLIPImageProcessor"}, "image_grid_thw"),
        ({"image_processor_type": "nonsense"}, "Unrecognized image processor"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_settings_that_make_no_patches_of_the_models_are_refused(
    folders: Folders, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    file = "preprocessor_config.json"
    refuses_pictures(changed(folders["qwen3_vl_moe"], tmp_path, file, "", changes), f"{file} .*{words}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"max_soft_tokens": 71}, "must be one of"), ({"pooling_kernel_size": 4}, PATCHES)],
)
def test_so_are_those_of_gemma(folders: Folders, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = changed(folders["gemma4"], tmp_path, "processor_config.json", "image_processor", changes)
    refuses_pictures(folder, words)
    (folder / "processor_config.json").write_text("{")
    refuses_pictures(folder, r"processor_config\.json cannot be used")


def refuses_pictures(folder: Path, words: str) -> None:
    source = find_vision(Checkpoint.open(folder))
    assert isinstance(source, VisionSource)
    reader = source.reader_or_refusal(CPU)
    assert isinstance(reader, NoProcessor)
    with pytest.raises(ConfigError, match=f"{words}.*download the model again, or ask without pictures"):
        reader.count(Image(picture(1)))


def test_pictures_are_scaled_down_whatever_settings_say(folders: Folders, tmp_path: Path) -> None:
    file = "preprocessor_config.json"
    source = find_vision(
        Checkpoint.open(changed(folders["qwen3_vl_moe"], tmp_path, file, "", {"do_resize": False}))
    )
    assert isinstance(source, VisionSource)
    assert source.reader(CPU).count(Image(picture(1, 1600, 1200))) <= 384


def test_a_picture_at_which_the_processor_fails_is_refused(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = find_vision(Checkpoint.open(folders["qwen3_vl_moe"]))
    assert isinstance(source, VisionSource)
    reader = source.reader(CPU)

    def fail(**given: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(reader, "_processor", fail)
    with pytest.raises(ConfigError, match=r"The picture cannot be processed .* use another one"):
        reader.count(Image(picture(1)))


@pytest.mark.parametrize(
    ("architecture", "part", "changes"),
    [
        ("qwen3_vl_moe", "", {"image_token_id": -1}),
        ("qwen3_vl_moe", "", {"image_token_id": 1 << 40}),
        ("gemma4", "", {"boi_token_id": -1}),
        (
            "gemma4",
            "text_config",
            {"hidden_size_per_layer_input": 16},
        ),  # looks tokens up behind the embedding
    ],
)
def test_models_that_see_in_a_way_that_is_not_known_read_none(
    folders: Folders, tmp_path: Path, architecture: str, part: str, changes: dict[str, Any]
) -> None:
    folder = changed(folders[architecture], tmp_path, "config.json", part, changes)
    assert find_vision(Checkpoint.open(folder)) is None


def test_an_encoder_whose_code_fails_is_refused_in_a_sentence(folders: Folders, tmp_path: Path) -> None:
    file, changes = "config.json", {"num_heads": 3}  # of 64 numbers
    source = find_vision(
        Checkpoint.open(changed(folders["qwen3_vl_moe"], tmp_path, file, "vision_config", changes))
    )
    assert isinstance(source, VisionSource)
    encoder, patches = source.encoder(torch.float32), source.reader(CPU).patches(Image(picture(1)))
    encoder.read()
    with pytest.raises(UnsupportedModelError, match=r"cannot run what reads pictures in .* ask without"):
        encoder.encode(patches, CPU)


def test_memory_that_a_gpu_lacks_is_no_failure_of_the_encoder(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = find_vision(Checkpoint.open(folders["qwen3_vl_moe"]))
    assert isinstance(source, VisionSource)
    encoder, patches = source.encoder(torch.float32), source.reader(CPU).patches(Image(picture(1)))
    encoder.read()

    def full(**given: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(encoder._model, "get_image_features", full)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        encoder.encode(patches, CPU)
