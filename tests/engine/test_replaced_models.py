"""A pull that puts another revision in a model's place while it is loaded, or after: nothing is made of
weights of both, and no draft of the old ones passes for one of the new."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gptq_builds import SMALL, build
from safetensors.torch import load_file, save
from support.engines import ROOMY, ask
from support.hub_home import REPO, hub_and_home, pull
from support.hub_server import HubServer, files_of

from localmoe.core.config import EngineConfig
from localmoe.core.errors import CheckpointError, DraftError, LocalMoeError
from localmoe.core.types import Progress
from localmoe.engine import Engine, loading, packing
from localmoe.engine.sources import CheckpointSource
from localmoe.experts.host_store import HostStore
from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.local_models import demo_folder
from localmoe.model import parallel_reader
from localmoe.model.draft_model import DraftModel, DraftModelShape
from localmoe.model.loader import load_shared, load_weights
from localmoe.model.skeleton import Skeleton, build_skeleton
from localmoe.model.weight_reader import WeightReader
from localmoe.quant.draft_checkpoint import DraftCheckpoint
from localmoe.quant.expert_reader import OpenFile

CPU = torch.device("cpu")
DRAFTING = EngineConfig(vram_budget_bytes=ROOMY, device="cpu", draft_length=4)
WEIGHTS = load_file(demo_folder() / "model.safetensors")


def revision(sign: float) -> dict[str, bytes]:
    """The demo model in four shards; files of all signs have the same sizes."""
    files = {name: data for name, data in files_of(demo_folder()).items() if name != "model.safetensors"}
    names, weight_map = sorted(WEIGHTS), {}
    for i in range(4):
        shard = f"model-{i + 1:05}-of-00004.safetensors"
        files[shard] = save({name: WEIGHTS[name] * sign for name in names[i::4]})
        weight_map |= dict.fromkeys(names[i::4], shard)
    index = {"metadata": {}, "weight_map": weight_map}
    return {**files, "model.safetensors.index.json": json.dumps(index).encode()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Revision 1 is here, revision 2 on the Hub; one thread reads."""
    monkeypatch.setattr(parallel_reader, "num_threads", lambda: 1)
    with hub_and_home(tmp_path) as hub:
        hub.commit(REPO, revision(1.0))
        pull()
        hub.commit(REPO, revision(-1.0))
        yield hub


def then_pull(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Pull once, after the first call."""
    real, done = getattr(owner, name), threading.Event()

    def call(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if not done.is_set():
            done.set()
            pull()
        return result

    patch.setattr(owner, name, call)


def loaded_source() -> tuple[CheckpointSource, Skeleton, HostStore]:
    source = CheckpointSource.open(REPO)
    skeleton = source.skeleton(torch.bfloat16)
    return source, skeleton, source.load_weights(skeleton, CPU, progress=None, cancel=None)


def own_draft(source: CheckpointSource, skeleton: Skeleton, store: HostStore) -> str:
    info, _ = source.load_draft(
        skeleton, store, CPU, None, packed=False, progress=None, cancel=None
    )  # fmt: skip
    return str(info)


def drafts(home: Path) -> list[DraftCheckpoint]:
    return [DraftCheckpoint.open(path.parent) for path in home.rglob("localmoe_draft.json")]


def test_a_pull_during_a_load_ends_it_with_one_sentence(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = CheckpointSource.open(REPO).checkpoint
    skeleton = build_skeleton(checkpoint, torch.bfloat16)
    then_pull(monkeypatch, WeightReader, "read_part")
    with pytest.raises(CheckpointError, match=r"00\d-of-00004\S+ has changed since it was opened: load the"):
        load_weights(skeleton, checkpoint, device=CPU)


def test_a_pull_that_changes_no_weights_does_not_disturb_a_load(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.commit(REPO, {**revision(1.0), "generation_config.json": b"{}"})
    old = CheckpointSource.open(REPO).checkpoint
    skeleton = build_skeleton(old, torch.bfloat16)
    then_pull(monkeypatch, WeightReader, "read_part")
    load_weights(skeleton, old, device=CPU).close()
    assert Checkpoint.open(old.folder).revision != old.revision
    state = skeleton.model.state_dict()
    shared = [name for name in WEIGHTS if name in state and not state[name].is_meta]
    assert shared and all(torch.equal(state[name], WEIGHTS[name]) for name in shared)


@pytest.mark.parametrize("ready", [False, True])
def test_weights_that_were_replaced_have_the_draft_that_they_had_and_get_no_new_one(
    hub: HubServer, tmp_path: Path, ready: bool
) -> None:
    source, skeleton, store = loaded_source()
    old = source.checkpoint
    if ready:
        own_draft(source, skeleton, store)
    pull()
    if ready:
        assert own_draft(source, skeleton, store) == "INT4 RTN, group 128"
    else:
        with pytest.raises(DraftError, match=r"org/moe have changed since .* load the model again\.$"):
            own_draft(source, skeleton, store)
    store.close()
    made = [(draft.provenance.base_fingerprint, draft.provenance.base_revision) for draft in drafts(tmp_path)]
    assert made == [(old.fingerprint(), old.revision)] * ready
    source, skeleton, store = loaded_source()
    assert source.checkpoint.fingerprint() != old.fingerprint()
    with pytest.raises(DraftError, match="There is no draft of these weights"):
        source.load_draft(
            skeleton, store, CPU, None, packed=False, may_build=False, progress=None, cancel=None
        )
    store.close()


@pytest.mark.slow
def test_a_load_whose_files_are_replaced_before_its_draft_is_built_answers_without_one(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        then_pull(patch, loading, "look_rows_up")  # the first step after the weights
        with Engine.load(REPO, EngineConfig(vram_budget_bytes=ROOMY, device="cpu")) as engine:
            assert "have changed since they were loaded" in engine.plan.drafting_reason
            assert "prompt lookup" in str(engine.info().draft) and ask(engine, "Hello").tokens
    assert not drafts(tmp_path)
    hub.commit(REPO, revision(2.0))
    then_pull(monkeypatch, loading, "look_rows_up")
    with pytest.raises(DraftError, match=r"so no draft is built of the old weights: load the model again\.$"):
        Engine.load(REPO, DRAFTING)


def test_an_engine_whose_files_were_replaced_goes_on_and_builds_no_better_draft(
    hub: HubServer, tmp_path: Path
) -> None:
    with Engine.load(REPO, DRAFTING) as engine:
        before = ask(engine, "Hello").tokens
        pull()
        with pytest.raises(LocalMoeError, match=r"changed since it was opened: load the model again\.$"):
            engine.improve_draft()
        assert ask(engine, "Hello").tokens == before
        assert engine.info().draft == "INT4 RTN, group 128"
    assert [draft.provenance.method for draft in drafts(tmp_path)] == ["rtn"]


def test_tokens_that_end_an_answer_are_those_of_the_weights(hub: HubServer) -> None:
    hub.commit(REPO, {**revision(-1.0), "generation_config.json": b'{"eos_token_id": [7]}'})
    source = CheckpointSource.open(REPO)
    encoder = source.encoder(1 << 20, torch.device("cpu"))
    before = source.end_tokens(encoder)
    pull()
    assert source.end_tokens(encoder) == before
    assert 7 not in before and 7 in CheckpointSource.open(REPO).end_tokens(encoder)


def test_shared_weights_are_not_read_again_from_files_that_were_replaced(hub: HubServer) -> None:
    source, _, store = loaded_source()
    pull()
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        load_shared(build_skeleton(source.checkpoint, torch.bfloat16), source.checkpoint, store, device=CPU)
    store.close()


@pytest.mark.slow
def test_a_draft_command_says_which_weights_it_read_or_builds_nothing(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        then_pull(patch, WeightReader, "read_part")
        with pytest.raises(CheckpointError, match="has changed since it was opened"):
            build(REPO, None)
    assert not drafts(tmp_path)
    hub.commit(REPO, revision(2.0))
    old = CheckpointSource.open(REPO).checkpoint
    old.fingerprint()
    pulled: list[int] = []

    def pull_once(done: int) -> None:
        if not pulled:
            pulled.append(done)
            pull()

    build(REPO, None, SMALL, pull_once)
    (draft,) = drafts(tmp_path)
    assert (draft.provenance.base_fingerprint, draft.provenance.base_revision) == (
        old.fingerprint(), old.revision,
    )  # fmt: skip


@pytest.mark.slow
def test_a_draft_that_is_replaced_while_it_is_read_is_not_read_on(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, skeleton, store = loaded_source()
    own_draft(source, skeleton, store)
    (draft,) = drafts(tmp_path)
    real: Callable[..., bytearray] = OpenFile.read

    def read(self: OpenFile, header: Any) -> bytearray:
        data = real(self, header)
        for file in draft.folder.glob("*.safetensors"):
            copy = file.with_suffix(".copy")
            copy.write_bytes(file.read_bytes())
            copy.replace(file)
        return data

    monkeypatch.setattr(OpenFile, "read", read)
    with pytest.raises(DraftError, match=r"has changed since it was opened: load the draft again\.$"):
        source.load_draft(
            skeleton, store, CPU, draft.folder, packed=False, progress=None, cancel=None
        )  # fmt: skip
    store.close()


def test_a_draft_model_that_is_replaced_while_it_is_loaded_is_refused(hub: HubServer) -> None:
    shape = DraftModelShape.read(REPO, CheckpointSource.open(REPO).model.folder)
    DraftModel.load(shape, CPU, torch.float32, 64).release()
    pull()
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        DraftModel.load(shape, CPU, torch.float32, 64)


def test_a_second_load_of_what_cannot_be_packed_has_the_text_side_of_its_own_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose first try read those of the files that a pull has replaced."""
    tries: list[Progress | str] = []

    class Source:
        name = "moe"

        def __init__(self, config: EngineConfig) -> None:
            self.revision = "plain" if tries else "packed"

        def encoder(self, vocab_size: int, device: object) -> str:
            return self.revision

        def can_pack(self, skeleton: object) -> bool:
            return False

        def can_pack_head(self, skeleton: object) -> bool:
            return False

    class Prepared:
        skeleton = None

        class footprint:
            vocab_size = 1
            expert_form = "bf12"

        class compute:
            device = torch.device("cpu")

        def __init__(self, config: EngineConfig) -> None:
            self.source = Source(config)

    def assemble(prepared: Prepared, config: EngineConfig, **options: object) -> str:
        if not tries:
            tries.append("packed")
            raise packing.UnpackableError("of no such exponents", lasting=False)
        return prepared.source.revision

    monkeypatch.setattr(packing, "assemble", assemble)
    parts, _, encoder = packing.load_parts(Prepared, EngineConfig(), progress=None, cancel=None)  # type: ignore
    assert parts == encoder == "plain"
