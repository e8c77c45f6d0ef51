"""Listing, resolving and removing models in a home and a cache made for each test."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from hypothesis import given
from hypothesis import strategies as st
from safetensors_files import write_model, write_sharded_model, write_snapshot

from localmoe.core.errors import (
    CheckpointError,
    ConfigError,
    LocalMoeError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from localmoe.hub import catalogue, local_models
from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.model_folder import is_moe
from localmoe.hub.names import is_repo_id, repo_id_of, safe_name

DENSE = {"model_type": "llama", "num_experts": 0}


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LOCALMOE_HOME, cache and embedded model under tmp_path."""
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(local_models, "demo_folder", lambda: tmp_path / "demo-moe")
    monkeypatch.chdir(tmp_path)


def names() -> list[str]:
    return [model.name for model in catalogue.list_models()]


def test_the_home_is_the_environment_s_or_in_the_user_s_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALMOE_HOME", "~/somewhere")
    assert catalogue.localmoe_home() == Path.home() / "somewhere"
    monkeypatch.setenv("LOCALMOE_HOME", "")
    assert catalogue.localmoe_home() == Path.home() / ".localmoe"


def test_the_embedded_model_lies_in_the_checkout() -> None:
    assert catalogue.demo_folder() == Path(__file__).parents[2] / "assets" / "demo-moe"


def test_nothing_on_the_machine_is_an_empty_list() -> None:
    assert catalogue.list_models() == []


@pytest.mark.parametrize("place", ["LOCALMOE_HOME", "HF_HUB_CACHE"])
def test_a_folder_that_the_system_refuses_to_look_into_holds_no_model(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(place, str(tmp_path / ("x" * 300)))  # refused to root too, unlike a lack of rights
    with pytest.raises(ModelNotFoundError, match="org/moe is not on this machine"):
        catalogue.resolve_model("org/moe")


def test_the_list_has_the_demo_own_models_and_complete_cached_moes(tmp_path: Path) -> None:
    write_model(tmp_path / "demo-moe")
    write_model(tmp_path / "home/models/me--mine")
    write_model(tmp_path / "home/models/me--dense", DENSE)
    (tmp_path / "home/models/me--empty").mkdir()
    write_snapshot(tmp_path / "hub", "org/moe")
    write_snapshot(tmp_path / "hub", "org/dense")
    (tmp_path / "hub/models--org--dense/blobs/abc123-config.json").write_text('{"model_type": "llama"}')
    half = write_snapshot(tmp_path / "hub", "org/half")
    (half / "model.safetensors").resolve().unlink()
    (tmp_path / "hub/datasets--org--moe2").mkdir()
    (tmp_path / "hub/models--org--nothing").mkdir()
    found = {model.name: (model.source, model.architecture) for model in catalogue.list_models()}
    assert found == {
        "demo": ("demo", "qwen2_moe"),
        "me/mine": ("localmoe", "qwen2_moe"),
        "org/moe": ("huggingface", "qwen2_moe"),
    }


def test_every_listed_model_resolves_by_its_name_to_the_same(tmp_path: Path) -> None:
    write_model(tmp_path / "demo-moe")
    for folder in ("me--mine", "plain", ".hidden", "a--b--c", "has space"):
        write_model(tmp_path / "home/models" / folder)
    write_snapshot(tmp_path / "hub", "org/moe")
    models = catalogue.list_models()
    assert [model.name for model in models] == ["demo", "me/mine", "plain", "org/moe"]
    assert [catalogue.resolve_model(model.name) for model in models] == models


def test_the_size_is_that_of_the_weight_files_behind_the_links(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / "hub", "org/moe")
    size = (snapshot / "model.safetensors").resolve().stat().st_size
    assert catalogue.resolve_model("org/moe").num_bytes == size > 40


def test_the_revision_that_main_stands_for_wins_and_otherwise_the_newest_complete_one(tmp_path: Path) -> None:
    old = write_snapshot(tmp_path / "hub", "org/moe", "old")
    new = write_snapshot(tmp_path / "hub", "org/moe", "new", main=False)
    os.utime(old, (1, 1))
    os.utime(new, (2, 2))
    assert catalogue.resolve_model("org/moe").folder == old
    (tmp_path / "hub/models--org--moe/refs/main").unlink()
    assert catalogue.resolve_model("org/moe").folder == new
    (new / "model.safetensors").unlink()
    assert catalogue.resolve_model("org/moe").folder == old


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "a"}, "a"),
        ({"HF_HOME": "b"}, "b/hub"),
        ({"XDG_CACHE_HOME": "c"}, "c/huggingface/hub"),
        ({"HOME": "d"}, "d/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_hugging_face_library_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    write_snapshot(tmp_path / expected, "org/moe")
    assert names() == ["org/moe"]


def test_a_folder_resolves_however_it_is_written(tmp_path: Path) -> None:
    write_model(tmp_path / "sub/moe")
    written = ["sub/moe", "./sub/moe", "sub/../sub/moe/", str(tmp_path / "sub/moe")]
    models = [catalogue.resolve_model(text) for text in written]
    assert {(model.name, model.folder, model.source) for model in models} == {
        ("moe", tmp_path / "sub/moe", "folder")
    }


def test_the_embedded_model_resolves_by_name_and_by_folder(tmp_path: Path) -> None:
    write_model(tmp_path / "demo-moe")
    assert catalogue.resolve_model("demo-moe") == catalogue.resolve_model("demo")


@pytest.mark.parametrize("text", ["", "  ", "a/b/c", "../x", "x; rm -rf ~", "\0", "x" * 5000, "-rf", "a--b"])
def test_what_is_neither_folder_nor_repo_id_is_not_found(text: str) -> None:
    with pytest.raises(ModelNotFoundError, match="neither") as caught:
        catalogue.resolve_model(text)
    assert len(str(caught.value)) < 400


def test_a_repo_that_is_not_here_names_the_command_that_brings_it() -> None:
    with pytest.raises(ModelNotFoundError, match="localmoe pull org/moe'"):
        catalogue.resolve_model("org/moe")


def test_a_repo_that_is_half_here_says_what_is_missing(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / "hub", "org/moe")
    (snapshot / "model.safetensors").resolve().unlink()
    with pytest.raises(CheckpointError, match=r"not complete.*localmoe pull org/moe.*model\.safetensors"):
        catalogue.resolve_model("org/moe")


def test_a_cached_repo_of_pickled_weights_is_unsupported_rather_than_incomplete(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / "hub", "org/moe")
    (snapshot / "model.safetensors").rename(snapshot / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError):
        catalogue.resolve_model("org/moe")


def test_drafts_lie_beside_the_demo_and_in_the_home_for_all_others(tmp_path: Path) -> None:
    write_model(tmp_path / "demo-moe")
    write_model(tmp_path / "home/models/me--mine")
    demo, mine = catalogue.list_models()
    fingerprint = "0123456789abcdef" * 4
    home = tmp_path / "home/drafts"
    beside = tmp_path / "demo-moe/draft-int4-gptq-g128"
    assert catalogue.draft_folder(demo, "gptq", 4, 128, fingerprint) == beside
    assert catalogue.draft_folder(demo, "rtn", 4, 64, fingerprint) == home / "demo-0123456789ab/int4-rtn-g64"
    place = catalogue.draft_folder(mine, "rtn", 4, 128, fingerprint)
    assert place == home / "me--mine-0123456789ab/int4-rtn-g128"
    for folder in (place, place.with_name(".int4-rtn-g128.tmp"), tmp_path / "demo-moe/draft-int4-gptq-g128"):
        folder.mkdir(parents=True)
    assert [model.drafts for model in catalogue.list_models()] == [
        (tmp_path / "demo-moe/draft-int4-gptq-g128",),
        (place,),
    ]


def test_an_own_model_is_removed_with_its_drafts_and_no_others(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "home/models/me--mine")
    model = catalogue.resolve_model("me/mine")
    draft = catalogue.draft_folder(model, "rtn", 4, 128, Checkpoint.open(folder).fingerprint())
    foreign = catalogue.draft_folder(model, "rtn", 4, 128, "0" * 64)
    for place in (draft, foreign):
        place.mkdir(parents=True)
        (place / "model.safetensors").write_bytes(b"x" * 1000)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert catalogue.remove_model("me/mine") == size + 1000
    assert names() == [] and foreign.is_dir() and not draft.exists()
    assert list((tmp_path / "home/models").iterdir()) == []


def test_a_damaged_own_model_can_be_removed(tmp_path: Path) -> None:
    folder = write_sharded_model(tmp_path / "home/models/me--mine")
    (folder / "config.json").unlink()
    assert catalogue.remove_model("me/mine") > 0
    assert not folder.exists()


def test_a_removal_that_was_cut_short_is_finished_by_the_next(tmp_path: Path) -> None:
    write_model(tmp_path / "home/models/.removing-old")
    write_model(tmp_path / "home/models/me--mine")
    assert names() == ["me/mine"]
    catalogue.remove_model("me/mine")
    assert list((tmp_path / "home/models").iterdir()) == []


def test_a_cached_model_is_removed_with_all_revisions_and_its_neighbours_stay(tmp_path: Path) -> None:
    for repo, revision in (("org/moe", "a" * 40), ("org/moe", "b" * 40), ("org/other", "c" * 40)):
        write_snapshot(tmp_path / "hub", repo, revision)
    blobs = tmp_path / "hub/models--org--moe/blobs"
    size = sum(path.stat().st_size for path in blobs.iterdir())
    assert catalogue.remove_model("org/moe") == size
    assert names() == ["org/other"] and not blobs.exists()


def test_nothing_but_listed_models_is_removed(tmp_path: Path) -> None:
    write_model(tmp_path / "demo-moe")
    write_model(tmp_path / "org/moe")
    with pytest.raises(ConfigError, match="embedded"):
        catalogue.remove_model("demo")
    for name in ("..", "../..", str(tmp_path / "org/moe"), ".", "", "~"):
        with pytest.raises(ConfigError):
            catalogue.remove_model(name)
    with pytest.raises(ModelNotFoundError):
        catalogue.remove_model("org/moe")  # a folder here, and no listed model
    assert (tmp_path / "org/moe/model.safetensors").exists()
    assert (tmp_path / "demo-moe/model.safetensors").exists()


def test_a_link_in_the_home_is_not_followed_by_a_removal(tmp_path: Path) -> None:
    write_model(tmp_path / "precious")
    (tmp_path / "home/models").mkdir(parents=True)
    (tmp_path / "home/models/me--mine").symlink_to(tmp_path / "precious")
    with pytest.raises(LocalMoeError, match="link"):
        catalogue.remove_model("me/mine")
    assert (tmp_path / "precious/model.safetensors").exists()
    assert names() == ["me/mine"]


def test_a_dense_model_in_the_cache_is_not_removed(tmp_path: Path) -> None:
    write_snapshot(tmp_path / "hub", "org/dense")
    (tmp_path / "hub/models--org--dense/blobs/abc123-config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelNotFoundError):
        catalogue.remove_model("org/dense")
    assert (tmp_path / "hub/models--org--dense").is_dir()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_experts": 60}, True),
        ({"num_local_experts": 8}, True),
        ({"n_routed_experts": 64}, True),
        ({"moe_num_experts": [64, 64]}, True),
        ({"text_config": {"num_experts": 128}}, True),
        ({"num_experts": None, "n_routed_experts": 64}, True),
        ({}, False),
        ({"num_experts": 1}, False),
        ({"num_experts": "8"}, False),
        ({"num_local_experts": 0}, False),
        ({"text_config": 5}, False),
        ({"moe_num_experts": [[64]]}, False),
    ],
)
def test_a_mixture_of_experts_is_known_by_its_expert_count(config: dict[str, object], expected: bool) -> None:
    assert is_moe(config) is expected


@given(st.from_regex(r"[\w.-]{1,8}(/[\w.-]{1,8})?", fullmatch=True))
def test_a_repo_id_survives_being_a_folder_name(text: str) -> None:
    if is_repo_id(text):
        assert repo_id_of(safe_name(text)) == text


@given(st.from_regex(r"[\w][\w.-]{80,95}/[\w][\w.-]{80,95}", fullmatch=True))
def test_the_longest_repo_ids_have_folders_of_their_own(text: str) -> None:
    if is_repo_id(text):
        assert repo_id_of(safe_name(text)) == text
        assert len(f".{safe_name(text)}.lock-{2**31}-{2**62}") <= 255, "what disks take"


def test_models_whose_long_names_end_otherwise_are_listed_and_removed_apart(tmp_path: Path) -> None:
    long = "some-organisation-of-researchers/" + "a-very-long-model-name-" * 3
    ids = [long + "base", long + "chat"]
    for repo_id in ids:
        write_model(tmp_path / "home/models" / safe_name(repo_id))
    assert names() == ids
    catalogue.remove_model(ids[0])
    assert names() == ids[1:] and catalogue.resolve_model(ids[1]).name == ids[1]


@given(st.text())
def test_a_safe_name_is_one_plain_path_component(text: str) -> None:
    name = safe_name(text)
    assert Path(name).name == name and name.isascii() and not name.startswith((".", "-"))


@given(st.from_regex(r"[\w.-]{0,6}(/[\w.-]{0,6}){0,2}\n?", fullmatch=True))
def test_a_repo_id_is_what_the_hugging_face_library_takes_for_one(text: str) -> None:
    try:
        validate_repo_id(text)
    except HFValidationError:
        assert not is_repo_id(text)
    else:
        assert is_repo_id(text)
