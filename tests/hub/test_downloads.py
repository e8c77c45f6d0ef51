"""Downloads from a Hub on this machine: what lands, where, what is refused before a byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hub_home import NEEDED, QUICK, REPO, contents, hub_and_home, needed_bytes, pull, small_model
from support.hub_server import TOKEN, Fault, HubServer

from localmoe.core.errors import CheckpointError, DownloadError, UnsupportedModelError
from localmoe.core.types import Progress
from localmoe.hub import download_folder
from localmoe.hub.catalogue import list_models, resolve_model
from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.download_record import DownloadRecord
from localmoe.hub.downloads import download_model

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with hub_and_home(tmp_path) as server:
        yield server


def file_bytes_sent(hub: HubServer) -> int:
    """Bytes of files that the Hub sent, less its answers about config and index, which every plan reads."""
    return sum(one.sent for one in hub.bodies() if one.server == "cdn")


def test_what_a_model_needs_lands_where_models_are_found_and_nothing_else(
    hub: HubServer, tmp_path: Path
) -> None:
    files = small_model()
    commit = hub.commit(REPO, files)
    folder = pull()
    assert folder == tmp_path / "models" / "org--moe" == resolve_model(REPO).folder
    assert contents(folder) == {name: files[name] for name in NEEDED}
    assert DownloadRecord.read(folder) == DownloadRecord(REPO, commit)
    assert REPO in [model.name for model in list_models()]
    assert [path.name for path in folder.parent.iterdir()] == ["org--moe"]


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer.model", "vocab.json"])
def test_the_vocabulary_comes_along_whatever_its_form(hub: HubServer, name: str) -> None:
    """Kimi Linear has a tiktoken.model alone."""
    files = small_model()
    del files["tokenizer.json"]
    hub.commit(REPO, {**files, name: b"a vocabulary"})
    assert (pull() / name).read_bytes() == b"a vocabulary"


def test_an_index_that_shards_left_beside_a_single_file_is_passed_over(hub: HubServer) -> None:
    """As transformers does, which reads the single file where there is one."""
    files = small_model()
    single = files.pop(FIRST)
    del files[SECOND]
    hub.commit(REPO, {**files, "model.safetensors": single})
    folder = pull()
    assert sorted(Checkpoint.open(folder).tensors) == ["a"] and pull() == folder
    (folder / "model.safetensors.index.json").write_bytes(files["model.safetensors.index.json"])
    assert sorted(Checkpoint.open(folder).tensors) == ["a"]  # as other tools download it
    (folder / SECOND).write_bytes(small_model()[SECOND])
    with pytest.raises(CheckpointError, match=f"{FIRST} is missing"):  # shards that are not whole stay so
        Checkpoint.open(folder)


def test_a_model_that_is_here_is_not_sent_again(hub: HubServer) -> None:
    hub.commit(REPO, small_model())
    pull()
    before = file_bytes_sent(hub)
    reports: list[Progress] = []
    download_model(REPO, progress=reports.append, options=QUICK)
    assert file_bytes_sent(hub) == before
    assert reports[-1].done == reports[-1].total == needed_bytes(small_model())


def test_a_revision_is_what_is_fetched(hub: HubServer) -> None:
    old = hub.commit(REPO, small_model())
    hub.commit(REPO, {**small_model(), "chat_template.jinja": b"new"})
    assert (pull(old) / "chat_template.jinja").read_bytes() == b"{{ messages }}"
    with pytest.raises(DownloadError, match="no revision 'nowhere'"):
        pull("nowhere")


def test_of_a_revision_that_is_not_there_those_that_are_are_said(hub: HubServer) -> None:
    commit = hub.commit(REPO, small_model())
    hub.repos[REPO].revisions = {"v1.0": commit, "gptq": commit}
    pull("v1.0")
    with pytest.raises(DownloadError) as caught:
        pull("v2")
    assert str(caught.value) == (
        f"{REPO} has no revision 'v2' on the Hub: it has 'main', 'gptq', 'v1.0'; use one of them."
    )
    hub.repos[REPO].revisions = {f"b{number}": commit for number in range(12)}
    with pytest.raises(DownloadError, match=r"commits go when .* 'b8' and 3 more; use one of them"):
        pull("0" * 40)
    for fault in (503, b"<html>", b'{"branches": 3}', b"[]"):
        hub.api_faults.extend([404, fault])
        with pytest.raises(DownloadError, match="no revision 'v2' on the Hub: leave it out for the main"):
            pull("v2")


def test_a_newer_commit_replaces_the_model_and_fetches_only_what_changed(hub: HubServer) -> None:
    hub.commit(REPO, small_model())
    pull()
    before = file_bytes_sent(hub)
    changed = {**small_model(), "chat_template.jinja": b"new", SECOND: small_model(777)[SECOND]}
    commit = hub.commit(REPO, changed)
    folder = pull()
    assert contents(folder) == {name: changed[name] for name in NEEDED}
    assert DownloadRecord.read(folder) == DownloadRecord(REPO, commit)
    assert file_bytes_sent(hub) - before == len(changed[SECOND])
    assert [path.name for path in folder.parent.iterdir()] == ["org--moe"]


def test_a_damaged_file_of_the_older_version_is_not_taken_over(hub: HubServer) -> None:
    hub.commit(REPO, small_model())
    damaged = pull() / FIRST
    damaged.write_bytes(bytes(damaged.stat().st_size))
    changed = {**small_model(), "chat_template.jinja": b"new"}
    hub.commit(REPO, changed)
    assert contents(pull()) == {name: changed[name] for name in NEEDED}


@pytest.mark.parametrize("name", [FIRST, "config.json", "tokenizer.json"])
def test_a_damaged_file_of_the_very_version_is_fetched_again_alone(hub: HubServer, name: str) -> None:
    files = small_model()
    hub.commit(REPO, files)
    damaged = pull() / name
    damaged.write_bytes(bytes(damaged.stat().st_size))
    hub.requests.clear()
    assert contents(pull()) == {name: files[name] for name in NEEDED}
    fetched = [one.path for one in hub.bodies() if one.server == "cdn" or not one.path.endswith(".json")]
    assert all(path.endswith(name) for path in fetched)


def test_a_folder_that_was_not_downloaded_is_left_as_it_is(hub: HubServer, tmp_path: Path) -> None:
    hub.commit(REPO, small_model())
    own = tmp_path / "models" / "org--moe"
    own.mkdir(parents=True)
    (own / "mine").write_text("mine")
    with pytest.raises(DownloadError, match="left as it is"):
        pull()
    assert [path.name for path in own.iterdir()] == ["mine"] and not hub.bodies(FIRST)
    (own / "localmoe_download.json").write_text("[" * 100_000)
    with pytest.raises(DownloadError, match="left as it is"):
        pull()
    record = '{"repo_id": "Org/Moe", "revision": "1"}'  # as where a disk ignores the case of names
    (own / "localmoe_download.json").write_text(record)
    with pytest.raises(DownloadError, match="holds Org/Moe: write the name in the same letters"):
        pull()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"config.json": b'{"model_type": "llama"}'}, UnsupportedModelError, "no Mixture-of-Experts"),
        ({"config.json": b"[]"}, DownloadError, "no JSON object"),
        ({"config.json": None}, DownloadError, r"no config\.json"),
        ({"model.safetensors.index.json": b'{"weight_map": {}}'}, DownloadError, "damaged"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "../y.st"}}'}, DownloadError, r"\.\./y\.st"),
        ({SECOND: None}, DownloadError, SECOND),
        (
            {"model.safetensors.index.json": None, FIRST: None, SECOND: None,
             "consolidated.00.safetensors": None},
            UnsupportedModelError,
            "safetensors",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_before_a_byte_lands(
    hub: HubServer,
    tmp_path: Path,
    change: dict[str, bytes | None],
    error: type[Exception],
    words: str,
) -> None:
    files = {**small_model(), **change}
    hub.commit(REPO, {name: data for name, data in files.items() if data is not None})
    with pytest.raises(error, match=words):
        pull()
    assert list((tmp_path / "models").iterdir()) == [] and file_bytes_sent(hub) == 0


def test_the_caller_s_check_sees_the_config_and_can_refuse(hub: HubServer, tmp_path: Path) -> None:
    hub.commit(REPO, small_model())

    def refuse(config: object) -> None:
        raise UnsupportedModelError(f"seen {config}")

    with pytest.raises(UnsupportedModelError, match=r"seen .*qwen2_moe"):
        download_model(REPO, check=refuse, options=QUICK)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_repo_that_is_not_there_or_not_for_you_says_what_to_do(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DownloadError, match=r"no model org/moe.*HF_TOKEN"):
        pull()
    with pytest.raises(DownloadError, match="no repo id"):
        download_model("../../etc", options=QUICK)
    hub.commit(REPO, small_model())
    hub.repos[REPO].gated = True
    with pytest.raises(DownloadError, match=r"gated.*org/moe.*HF_TOKEN or run 'hf auth login'"):
        pull()
    monkeypatch.setenv("HF_TOKEN", "hf_without_access")
    with pytest.raises(DownloadError, match="your token has no access"):
        pull()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert pull().is_dir()


def test_the_token_goes_to_the_hub_and_not_to_where_it_redirects(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.commit(REPO, small_model())
    pull()
    tokens = {(one.server, one.token) for one in hub.requests}
    assert tokens == {("hub", TOKEN), ("cdn", None)}


def test_a_disk_too_small_is_refused_with_the_numbers_minus_what_is_here(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = small_model(1 << 18)
    hub.commit(REPO, files)
    total = needed_bytes(files)
    room = [total + (64 << 20) - 1]
    monkeypatch.setattr(download_folder, "free_disk_bytes", lambda folder: room[0])
    with pytest.raises(DownloadError, match=r"66\.0 MiB more.*66\.0 MiB free.*LOCALMOE_HOME"):
        pull()
    assert file_bytes_sent(hub) == 0
    room[0] += 1
    hub.fail(FIRST, *[Fault(cut_after=1 << 19), *[Fault(status=503)] * 9])
    with pytest.raises(DownloadError, match="4 times in a row"):
        pull()
    hub.faults.clear()
    room[0] -= 1 << 19
    pull()


def test_a_file_that_an_earlier_version_left_out_is_fetched_alone(hub: HubServer) -> None:
    """As how pictures are read, which a model has that was downloaded before."""
    names = "preprocessor_config.json", "processor_config.json"
    hub.commit(REPO, {**small_model(), **dict.fromkeys(names, b'{"patch_size": 16}')})
    folder = pull()
    for name in names:
        (folder / name).unlink()
    sent = file_bytes_sent(hub)
    assert pull() == folder
    assert all((folder / name).read_bytes() == b'{"patch_size": 16}' for name in names)
    assert file_bytes_sent(hub) - sent < 1000
