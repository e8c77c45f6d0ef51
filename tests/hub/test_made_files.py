"""What was made of models (drafts, a file of their experts): what it takes, and deleting it."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors_files import write_model

from localmoe.core.errors import ConfigError, ModelNotFoundError
from localmoe.hub import catalogue, local_models
from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.draft_places import drafts_home, homes_of_others, record_files

RECORDS = "experts-bf12-bfloat16.records"


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCALMOE_HOME, cache and embedded model under tmp_path."""
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(local_models, "demo_folder", lambda: tmp_path / "demo-moe")


def make(name: str, folder: Path | None = None, *, draft: int = 1000, records: int = 5000) -> Path:
    """The folder of what was made of it."""
    home = drafts_home(name, "0" * 64 if folder is None else Checkpoint.open(folder).fingerprint())
    (home / "int4-gptq-g128").mkdir(parents=True)
    (home / "int4-gptq-g128/model.safetensors").write_bytes(bytes(draft))
    (home / RECORDS).write_bytes(bytes(records))
    return home


def test_a_model_is_removed_with_the_file_of_its_experts(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "home/models/me--mine")
    home, other = make("me/mine", folder), make("me/other")
    (one,) = catalogue.list_models()
    assert (one.made_bytes, one.record_bytes) == (6000, 5000)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert catalogue.remove_model("me/mine") == size + 6000
    assert not home.exists() and homes_of_others(["me/mine"]) == [("me--other", other)]
    assert homes_of_others(["me/other"]) == []


def test_the_file_alone_is_removed_and_the_draft_stays(tmp_path: Path) -> None:
    home = make("me/mine", write_model(tmp_path / "home/models/me--mine"))
    assert catalogue.remove_made("me/mine", records_alone=True) == 5000
    assert record_files(home) == {} and len(list(home.iterdir())) == 1
    (one,) = catalogue.list_models()
    assert (one.made_bytes, one.record_bytes) == (1000, 0)
    with pytest.raises(ModelNotFoundError, match="no file of the experts of 'me/mine'"):
        catalogue.remove_made("me/mine", records_alone=True)
    other = drafts_home("me/other", "0" * 64)
    other.mkdir()
    (other / RECORDS).touch()
    assert catalogue.remove_made("me/other", records_alone=True) == 0 and not other.exists()


@pytest.mark.parametrize("called", ["folder", "name", "listed"])
def test_what_was_made_of_a_folders_model_is_removed_without_it(called: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "elsewhere/my model")
    home = make("my model", folder)
    names = {"folder": str(folder), "name": "my model", "listed": homes_of_others([])[0][0]}
    if called != "listed":
        with pytest.raises(ConfigError, match=r"5\.9 KiB of drafts or experts were made here, in .*--made"):
            catalogue.remove_model(names[called])
    assert catalogue.remove_made(names[called]) == 6000
    assert not home.exists() and (folder / "model.safetensors").exists()
    with pytest.raises(ModelNotFoundError, match="Nothing was made"):
        catalogue.remove_made(names[called])


def test_a_model_that_is_gone_says_what_it_left() -> None:
    home = make("gone")
    with pytest.raises(ModelNotFoundError, match="--made") as refusal:
        catalogue.remove_model("gone")
    assert str(home) in str(refusal.value)


def test_no_name_means_nothing() -> None:
    home = make("model")  # what a name without letters is kept as
    for name in ("", " "):
        with pytest.raises(ModelNotFoundError):
            catalogue.remove_made(name)
    assert home.exists()
