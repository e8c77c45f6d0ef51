"""Models whose experts lie in a file on the disk, with few of them in RAM: the same answers as from RAM."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import ROOMY, Answer, ask, budget_for_slots, check_stats, runner_of
from support.float8_models import KEPT_BLOCK, write_float8_model
from support.int4_models import write_int4_model
from support.mxfp4_models import write_mxfp4_model
from support.nvfp4_models import write_nvfp4_model
from support.shapes import ask_ids, tiny_shape
from support.tiny_models import tied_model_storing, tiny_model, write_model

from localmoe.core.config import DraftLength, EngineConfig, GenerationRequest, SamplingConfig
from localmoe.core.errors import BudgetError, ConfigError, DiskError, LoadCancelledError, LocalMoeError
from localmoe.core.synthetic import SyntheticSettings
from localmoe.core.types import Message, Progress
from localmoe.core.units import parse_bytes
from localmoe.engine import Engine, plan_model, planning
from localmoe.experts import ram_arena, record_file
from localmoe.experts.disk_reader import DiskReader
from localmoe.experts.disk_store import DiskStore
from localmoe.hardware.facts import Hardware
from localmoe.hub.checkpoint import Checkpoint
from localmoe.kernels.weight_forms import WeightForm

CONTEXT = 512
PROMPTS = ("Hello there, how are", "z", "word " * 80)  # the last one is longer than a prompt's pass
SAMPLED = SamplingConfig(temperature=1.0, seed=5)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def page_bytes(engine: Engine) -> int:
    return -(-engine.footprint.expert_bytes // 4096) * 4096


def load(folder: Path | str, **config: Any) -> Engine:
    return Engine.load(str(folder), EngineConfig(device="cpu", cpu_threads=2, context=CONTEXT, **config))


def load_from_disk(folder: Path | str, ram_experts: int = 0, **config: Any) -> Engine:
    """With room for so many, or for those of one layer."""
    wanted = {"experts_on": "disk", **config}
    footprint, _ = plan_model(str(folder), EngineConfig(device="cpu", context=CONTEXT, **wanted))
    ram_experts = ram_experts or footprint.num_experts
    each = -(-footprint.expert_bytes // 4096) * 4096
    engine = load(folder, ram_budget_bytes=ram_experts * each, **wanted)
    assert engine.plan.ram_experts == ram_experts < footprint.total_experts
    assert store_of(engine).ram_experts == ram_experts
    return engine


def store_of(engine: Engine) -> DiskStore:
    store = engine._loaded.store
    assert isinstance(store, DiskStore)
    return store


def files_in(home: Path) -> list[Path]:
    return sorted(path for path in home.rglob("*") if path.is_file() and "records" in path.name)


def check_disk(engine: Engine, answer: Answer) -> None:
    """What must hold of an answer's statistics, with nothing under way before and after it."""
    check_stats(answer)
    stats, store = answer.stats, store_of(engine)
    assert stats.disk_bytes % page_bytes(engine) == 0
    assert stats.wasted <= stats.prefetched
    check_let_go(store)
    if engine.plan.in_place:
        decoding = round((stats.disk_bytes_per_token or 0) * max(0, stats.new_tokens - 1))
        fetched = stats.misses + stats.prefetched
        assert decoding <= fetched * page_bytes(engine), "each was asked for"
        assert stats.h2d_bytes == 0 and stats.cpu_bytes > 0


def check_let_go(store: DiskStore) -> None:
    """Nobody holds an expert in RAM, once what was read or copied ahead has arrived."""
    end = time.monotonic() + 30
    while True:
        with store.lock:
            if not store._places.held.any():
                return
        assert time.monotonic() < end, np.argwhere(store._places.held)
        time.sleep(0.001)


FORMS = {
    "packed": lambda folder: write_model(folder, tiny_model("qwen2_moe", dtype=torch.bfloat16)),
    "tied": lambda folder: tied_model_storing(folder, "one value twice", torch.bfloat16),
    "fp8": lambda folder: write_float8_model(
        folder, tiny_model("qwen3_moe", dtype=torch.bfloat16), block=KEPT_BLOCK
    )[0],
    "nvfp4": lambda folder: write_nvfp4_model(folder, tiny_model("qwen3_moe", dtype=torch.bfloat16))[0],
    "int4": lambda folder: write_int4_model(folder, tiny_model("qwen3_moe", dtype=torch.bfloat16))[0],
    "mxfp4": lambda folder: write_mxfp4_model(folder, tiny_model("gpt_oss", dtype=torch.bfloat16)),
    "float16": lambda folder: write_model(folder, tiny_model("mixtral", dtype=torch.float16)),
    "float32": lambda folder: write_model(folder, tiny_model("olmoe")),
    "transposed": lambda folder: write_model(folder, tiny_model("gpt_oss", dtype=torch.bfloat16)),
    "recurrent": lambda folder: write_model(folder, tiny_model("qwen3_next", dtype=torch.bfloat16)),
}


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("budget", [{}, {"vram_budget_bytes": ROOMY}], ids=["in place", "through slots"])
@pytest.mark.parametrize("form", FORMS)
def test_answers_are_those_from_ram_for_every_length_and_policy(
    form: str, budget: dict[str, int], tmp_path: Path
) -> None:
    folder = FORMS[form](tmp_path / form)
    asked: DraftLength = 0 if form == "recurrent" else 4  # which nobody can roll back on a CPU
    with load(folder, draft_length=asked, **budget) as engine:
        in_place = engine.plan.in_place
        lengths: tuple[DraftLength, ...] = (0, 4, "auto") if engine.plan.drafting else (0,)
        expected = {length: texts(engine, length) for length in lengths}
    # the file is made by the first
    for ram_experts, policies in ((0, ("on-demand", "next-gate")), (11, ("next-gate",))):
        with load_from_disk(folder, ram_experts, draft_length=asked, **budget) as engine:
            assert engine.plan.in_place == in_place and engine.plan.drafting == (asked == 4)
            for policy in policies:
                for length in lengths:
                    found = texts(engine, length, policy=policy)
                    assert found == expected[length], (ram_experts, policy, length)


def test_slots_have_a_file_of_decoded_weights(tmp_path: Path, home: Path) -> None:
    folder = FORMS["packed"](tmp_path / "packed")
    for files, budget in ((1, {}), (2, {"vram_budget_bytes": ROOMY})):
        for _ in range(2):
            with load_from_disk(folder, draft_length=0, **budget):
                assert len(files_in(home)) == files


def texts(engine: Engine, length: DraftLength, **request: Any) -> list[list[int]]:
    """Greedy answers, and sampled ones where they are no matter of time."""
    answers = [ask(engine, prompt, 8, draft_length=length, **request) for prompt in PROMPTS]
    if length != "auto":
        answers += [ask(engine, p, 8, draft_length=length, sampling=SAMPLED, **request) for p in PROMPTS]
    for answer in answers:
        check_stats(answer)
        if isinstance(engine._loaded.store, DiskStore):
            check_disk(engine, answer)
    return [answer.tokens for answer in answers]


@pytest.fixture
def folder(tiny16: Callable[[str], Path]) -> Path:
    """Of a packed model with 24 experts."""
    return tiny16("qwen2_moe")


def test_few_slots_are_filled_from_few_experts_in_ram(folder: Path) -> None:
    budget = budget_for_slots(str(folder), 5, device="cpu", context=CONTEXT)
    with load(folder, vram_budget_bytes=ROOMY, draft_length=0) as engine:
        expected = texts(engine, 0)
    with load_from_disk(folder, vram_budget_bytes=budget, draft_length=0) as engine:
        for policy in ("on-demand", "next-gate", "moe-infinity"):
            assert texts(engine, 0, policy=policy) == expected
        assert engine.resize(ROOMY).num_slots == 24 and engine.plan.ram_experts == 8
        assert texts(engine, 0) == expected
        engine.resize(budget)
        assert engine.plan.num_slots < 24 and store_of(engine).ram_experts == engine.plan.ram_experts == 8
        assert texts(engine, 0) == expected


@pytest.mark.parametrize("policy", ["on-demand", "moe-speq"])
def test_what_slots_and_ram_have_room_for_together_is_read_once(policy: str, folder: Path) -> None:
    budget = budget_for_slots(str(folder), 12, device="cpu", context=CONTEXT)
    with load_from_disk(folder, 18, vram_budget_bytes=budget, draft_length=0) as engine:
        store = store_of(engine)
        for _ in range(4):
            read = store.read_bytes
            texts(engine, 0, policy=policy)
        assert store.read_bytes == read > 0
        assert (store.worth() > 0).sum() > store.ram_experts, "RAM hears of what slots were asked for"


def test_in_place_there_are_no_slots_to_divide(folder: Path) -> None:
    with load_from_disk(folder, draft_length=0) as engine:
        before = engine.plan
        with pytest.raises(ConfigError, match="takes no slots"):
            engine.resize(ROOMY)
        assert engine.resize(None) == before


def test_a_chat_that_comes_back_reads_only_what_is_new(folder: Path) -> None:
    first = [Message("user", "Hello"), Message("assistant", "Hello there"), Message("user", "And now?")]
    other = [Message("user", "Something else")]
    with load(folder, draft_length=0) as engine:
        expected = [ask(engine, chat, 6).tokens for chat in (first, other, first)]
    with load_from_disk(folder, draft_length=0) as engine:
        answers = [ask(engine, chat, 6) for chat in (first, other, first)]
        assert [answer.tokens for answer in answers] == expected
        assert answers[2].stats.reused_tokens > 0
        assert answers[2].stats.disk_bytes < answers[0].stats.disk_bytes
        engine.reset()
        assert ask(engine, first, 6).tokens == expected[0]


def test_what_a_prompt_has_read_shows_while_it_is_read(folder: Path) -> None:
    with load_from_disk(folder, 9, draft_length=0) as engine:
        runner, seen = runner_of(engine), []
        run = runner.run

        def run_and_look(tokens: Any, phase: Any, **more: Any) -> torch.Tensor:
            logits = run(tokens, phase, **more)
            seen.append(engine.live.prompt())
            return logits

        runner.run = run_and_look  # type: ignore[method-assign]
        stats = ask(engine, PROMPTS[2], 1).stats
        read = [one.disk_bytes for one in seen if one is not None]
        assert len(read) == 2 and 0 < read[0] < read[1] == stats.disk_bytes


def test_an_answer_that_is_stopped_while_its_prompt_is_read_says_what_was_read_ahead(folder: Path) -> None:
    """And what of it gave way unused, as one that goes on says."""
    with load_from_disk(folder, 9, draft_length=0) as engine:
        runner, stop = runner_of(engine), threading.Event()
        run = runner.run

        def run_and_stop(tokens: Any, phase: Any, **more: Any) -> torch.Tensor:
            logits = run(tokens, phase, **more)
            stop.set()
            return logits

        runner.run = run_and_stop  # type: ignore[method-assign]
        request = GenerationRequest(prompt=PROMPTS[2], max_new_tokens=4)
        answer, totals = Answer(list(engine.stream(request, stop))), engine.transfer_counters()
        assert answer.finish_reason == "cancelled" and not answer.tokens
        found = (answer.stats.prefetched, answer.stats.wasted)
        assert found == (totals.prefetched, totals.wasted) and totals.prefetched > 0


def test_ram_is_filled_while_nobody_asks_and_empty_after_a_reset(folder: Path) -> None:
    with load(folder, draft_length=0) as engine:
        expected = ask(engine, PROMPTS[0], 8).tokens
    with load_from_disk(folder, 12, draft_length=0) as engine:
        first = ask(engine, PROMPTS[0], 8)
        engine.reset()
        assert store_of(engine).residency().any()
        engine.reset(ram=True)
        assert not store_of(engine).residency().any() and not engine.live.resident().any()
        engine.captures.begin()
        end = time.monotonic() + 30
        while (store_of(engine).addresses != 0).sum() < 12:
            assert time.monotonic() < end
            time.sleep(0.001)
        second = ask(engine, PROMPTS[0], 8)
        assert first.tokens == second.tokens == expected
        assert second.stats.disk_bytes < first.stats.disk_bytes
        assert first.stats.disk_busy_s > 0
        assert engine.transfer_counters().disk_bytes > first.stats.disk_bytes + second.stats.disk_bytes


def test_unasked_experts_have_the_memory_of_a_draft(folder: Path) -> None:
    """Which has to be there already where the CPU computes in place, and else is built."""
    for budget in ({}, {"vram_budget_bytes": ROOMY}):
        load(folder, draft_length=4, **budget).close()
        with load(folder, **budget) as engine:
            assert engine.plan.drafting
            expected = texts(engine, "auto")
        with load_from_disk(folder, **budget) as engine:
            assert not engine.plan.drafting and "else come from the disk" in engine.plan.drafting_reason
            assert texts(engine, "auto") == expected


@pytest.mark.slow
def test_a_draft_is_built_from_the_disk_and_a_better_one_in_a_pause(folder: Path) -> None:
    with load(folder, draft_length=4) as engine:
        expected, drafted = texts(engine, 4)[: len(PROMPTS)], str(engine._loaded.draft)
    for draft in files_of_drafts(folder):
        draft.unlink()
    with load_from_disk(folder, draft_length=4) as engine:
        assert str(engine._loaded.draft) == drafted and "RTN" in drafted
        assert texts(engine, 4)[: len(PROMPTS)] == expected
        assert "GPTQ" in engine.improve_draft()
        assert texts(engine, 4)[: len(PROMPTS)] == expected
        check_let_go(store_of(engine))


def files_of_drafts(folder: Path) -> list[Path]:
    home = Path(os.environ["LOCALMOE_HOME"])
    found = list((home / "drafts").rglob("*.safetensors"))
    assert found
    return found


@pytest.mark.slow
def test_what_cannot_be_packed_lies_there_in_16_bits_alone(tmp_path: Path, home: Path) -> None:
    folder = write_model(tmp_path / "model", tiny_model("mixtral", dtype=torch.bfloat16))
    tensors = load_file(folder / "model.safetensors")
    name = max(name for name in tensors if "experts" in name and tensors[name].dim() >= 2)
    rows = tensors[name][0] if tensors[name].dim() == 3 else tensors[name]
    rows[:16] = 2.0 ** (-torch.arange(rows.shape[1]) % 120).float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with load(folder, draft_length=0) as engine:
        expected = texts(engine, 0)
    (home / "unpackable.json").unlink()
    for _ in range(2):  # while it is found out, and remembered
        with load(folder, experts_on="disk", ram_budget_bytes=1 << 20, draft_length=0) as engine:
            assert engine.prepared.skeleton.experts[0].layout.form is WeightForm.PLAIN
            assert texts(engine, 0) == expected
            assert [path.name for path in files_in(home)] == ["experts-plain-bfloat16.records"]


@pytest.mark.parametrize("stage", ["Loading weights", "Writing the experts' file"])
def test_a_load_that_is_cancelled_leaves_no_file(
    folder: Path, home: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_file, "_SYNCED_BYTES", 1 << 16)
    cancel = threading.Event()

    def told(progress: Progress) -> None:
        if progress.stage == stage:
            cancel.set()

    config = EngineConfig(device="cpu", context=CONTEXT, experts_on="disk", draft_length=0)
    with pytest.raises(LoadCancelledError):
        Engine.load(str(folder), config, progress=told, cancel=cancel)
    assert list((home / "drafts").iterdir()) == [], "a folder would be listed as made of the model"
    threads = [thread.name for thread in threading.enumerate() if "disk" in thread.name]
    assert threads == []


def test_a_second_load_reads_no_expert_of_the_checkpoint(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "fingerprint", lambda checkpoint: "0" * 64)
    folder = write_model(tmp_path / "model", tiny_model("qwen2_moe", dtype=torch.bfloat16))
    with load_from_disk(folder, draft_length=0) as engine:
        expected = texts(engine, 0)
    (file,) = files_in(home)
    written = file.stat().st_mtime_ns
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if ".experts." in name:
            tensors[name].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    told: list[Progress] = []
    config = EngineConfig(device="cpu", cpu_threads=2, context=CONTEXT, experts_on="disk", draft_length=0)
    with Engine.load(str(folder), config, progress=told.append) as engine:
        assert texts(engine, 0) == expected
    assert {progress.stage for progress in told} == {"Loading weights"}
    assert all(progress.done <= progress.total for progress in told)
    assert file.stat().st_mtime_ns == written


def test_a_file_of_other_weights_or_a_damaged_one_is_written_anew(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its path is the same. Told by the prompt that asks for most experts."""
    fingerprint = Checkpoint.fingerprint
    monkeypatch.setattr(Checkpoint, "fingerprint", lambda found: "0" * 12 + fingerprint(found))
    answers = []
    for seed in (0, 1):
        folder = write_model(tmp_path / "model", tiny_model("qwen2_moe", seed=seed, dtype=torch.bfloat16))
        with load(folder, draft_length=0) as engine:
            answers.append(ask(engine, PROMPTS[2], 8).tokens)
        with load_from_disk(folder, draft_length=0) as engine:
            assert ask(engine, PROMPTS[2], 8).tokens == answers[-1]
        (file,) = files_in(home)
    assert answers[0] != answers[1]
    for length in (5000, file.stat().st_size - 1):
        os.truncate(file, length)
        with load_from_disk(folder, draft_length=0) as engine:
            assert ask(engine, PROMPTS[2], 8).tokens == answers[1]


def test_a_damaged_file_takes_no_room_from_the_one_in_its_place(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_from_disk(folder, draft_length=0):
        (file,) = files_in(home)
    whole, disk_bytes = file.stat().st_size, file.stat().st_size * 3 // 2
    os.truncate(file, whole - 1)

    def free(place: Path) -> SimpleNamespace:
        held = sum(path.stat().st_size for path in files_in(home))
        return SimpleNamespace(free=disk_bytes - held + record_file._SPARE_BYTES)

    monkeypatch.setattr(record_file.shutil, "disk_usage", free)
    with load_from_disk(folder, draft_length=0):
        assert file.stat().st_size == whole


def test_a_file_that_is_cut_while_it_is_loaded_ends_the_answer_with_a_sentence(
    folder: Path, home: Path
) -> None:
    for budget in (
        {},
        {"vram_budget_bytes": budget_for_slots(str(folder), 5, device="cpu", context=CONTEXT)},
    ):
        with load_from_disk(folder, draft_length=0, **budget) as engine:
            expected = ask(engine, "z", 8).tokens
            (file,) = files_in(home)
            content = file.read_bytes()
            os.truncate(file, 1 << 16)
            with pytest.raises(LocalMoeError, match="shorter than it was: load the model again") as told:
                ask(engine, PROMPTS[0], 8)
            assert "\n" not in str(told.value)
            file.write_bytes(content)
            assert ask(engine, "z", 8).tokens == expected
            file.unlink()  # that changes nothing
            assert ask(engine, "z", 8, policy="next-gate").tokens == expected


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(13, "Permission denied")])
def test_a_disk_that_refuses_is_a_sentence_and_leaves_nothing(
    folder: Path, home: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    def refuse(handle: int, num_bytes: int) -> None:
        raise error

    monkeypatch.setattr(record_file, "_allocate", refuse)
    with pytest.raises(
        DiskError, match=f"cannot be written.*{error.strerror}.*set LOCALMOE_HOME to a folder on another"
    ):
        load_from_disk(folder, draft_length=0)
    assert files_in(home) == []


def test_a_ram_budget_that_is_too_small_names_one_that_fits(folder: Path) -> None:
    config: dict[str, Any] = {"experts_on": "disk", "draft_length": 0}
    with pytest.raises(BudgetError, match="does not hold the 8 experts of a layer") as told:
        load(folder, ram_budget_bytes=5000, **config)
    named = re.search(r"give at least (\S+)\.$", str(told.value))
    assert named
    with load(folder, ram_budget_bytes=parse_bytes(named[1]), **config) as engine:
        assert engine.plan.ram_experts == 8


@pytest.mark.slow
def test_slots_in_the_same_ram_leave_room_for_a_layers_experts(
    tiny: Callable[[str], tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model that is computed through slots without being asked, where RAM does not hold all twice."""
    folder = tiny("olmoe")[0]
    config = EngineConfig(device="cpu", context=128, draft_length=0, experts_on="disk")
    footprint, plan = plan_model(str(folder), config)
    assert not plan.in_place and plan.num_slots == plan.ram_experts == 24
    each, refused = footprint.expert_bytes, 0
    least = plan.total_bytes - 24 * plan.slot_bytes + 3 * plan.slot_bytes + 8 * each
    for room in range(least - 4 * each, least + 40 * each, each):
        with_room(monkeypatch, room)
        if room < least:
            with pytest.raises(BudgetError, match=r"The 8 experts of a layer of .* need"):
                plan_model(str(folder), config)
            refused += 1
            continue
        _, plan = plan_model(str(folder), config)
        assert plan.ram_experts >= 8 and plan.total_bytes + plan.host_bytes <= room + 4
        _, asked = plan_model(str(folder), replace(config, ram_budget_bytes=8 * each))
        assert asked.ram_experts == 8
    assert refused == 4 and plan.num_slots == plan.ram_experts == 24


def with_room(monkeypatch: pytest.MonkeyPatch, num_bytes: int, held: int = 0) -> None:
    """A computer with so much RAM for models, of which this one holds some."""
    free, most = -(-num_bytes * 4 // 3) - held, 1 << 40
    computer = Hardware((), "", "", 2, 2, (), most, free, most, 1e9, "Linux", "3", "2")
    monkeypatch.setattr(planning, "probe_hardware", lambda **_: computer)


def test_a_budget_is_refused_where_what_ram_holds_would_not_fit_beside_it(
    tiny: Callable[[str], tuple[Path, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tiny("olmoe")[0])
    config: dict[str, Any] = {"device": "cpu", "context": CONTEXT, "draft_length": 0}
    few, many = (budget_for_slots(folder, slots, **config) for slots in (3, 9))
    with load_from_disk(folder, 12, vram_budget_bytes=few, draft_length=0) as engine:
        before, expected = engine.plan, ask(engine, "z", 6).tokens
        held, needed = engine._budget._held(), before.total_bytes + before.host_bytes
        with_room(monkeypatch, needed + 3 * before.slot_bytes, held)
        assert engine.resize(few + engine.plan.slot_bytes).num_slots == 4
        with pytest.raises(BudgetError, match="would not fit beside it: give a budget of at most") as told:
            engine.resize(many)
        assert engine.plan.num_slots == 4 and engine.plan.ram_experts == 12
        most = told.value.budget_bytes
        assert most is not None and 4 <= engine.resize(most).num_slots < 12
        with_room(monkeypatch, needed - before.slot_bytes, held)  # others have taken the rest, and more
        assert replace(engine.resize(few), budget_bytes=few) == before
        assert ask(engine, "z", 6).tokens == expected


def test_a_ram_budget_without_experts_on_the_disk_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="ask for both"):
        EngineConfig(ram_budget_bytes=1 << 30)


@pytest.mark.parametrize("policy", ["next-gate", "adapmoe"])
def test_what_the_next_gate_chooses_is_read_ahead(folder: Path, policy: str) -> None:
    """Also where linear layers, and so what PyTorch calls the model's dtype, are of 16 bits."""
    with load_from_disk(folder, 12, draft_length=0) as engine:
        assert engine.plan.in_place
        expected = ask(engine, PROMPTS[0], 24, sampling=SAMPLED).tokens
        answer = ask(engine, PROMPTS[0], 24, policy=policy, sampling=SAMPLED)
        check_disk(engine, answer)
        assert answer.tokens == expected and answer.stats.prefetched > 0


def test_what_was_read_ahead_for_an_answer_is_no_waste_of_the_next(folder: Path) -> None:
    with load_from_disk(folder, 9, draft_length=0) as engine:
        for _ in range(3):
            answer = ask(engine, PROMPTS[0], 24, policy="next-gate", sampling=SAMPLED)
            assert answer.stats.prefetched > 0
            answer = ask(engine, PROMPTS[1], 24, policy="on-demand", sampling=SAMPLED)
            assert (answer.stats.prefetched, answer.stats.wasted) == (0, 0)


def test_with_room_for_all_each_expert_is_read_once(folder: Path) -> None:
    with load(folder, experts_on="disk", draft_length=0) as engine:
        assert engine.plan.ram_experts == engine.footprint.total_experts
        for _ in range(3):
            texts(engine, 0, policy="next-gate")
        found = engine.transfer_counters()
        assert found.disk_bytes <= 24 * page_bytes(engine) and found.wasted == 0


def test_answers_that_are_stopped_or_fail_leave_nothing_held(folder: Path) -> None:
    with load_from_disk(folder, draft_length=0) as engine:
        expected = ask(engine, "z", 12).tokens
        for policy in ("on-demand", "next-gate"):
            answer = engine.stream(GenerationRequest(prompt="z", max_new_tokens=12, policy=policy))
            next(answer)
            answer.close()
            assert ask(engine, "z", 12, policy=policy).tokens == expected
        check_let_go(store_of(engine))


def test_closing_in_the_middle_of_an_answer_ends_it_and_frees_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, fill = threading.Event(), DiskReader._fill

    def slow(*arguments: Any) -> None:
        begun.set()
        time.sleep(0.01)
        fill(*arguments)

    for budget in ({}, {"vram_budget_bytes": ROOMY}):
        engine = load_from_disk(folder, draft_length=0, **budget)
        store, ended = store_of(engine), []
        monkeypatch.setattr(DiskReader, "_fill", slow)
        begun.clear()

        def answer(engine: Engine = engine, ended: list[BaseException] = ended) -> None:
            try:
                for _ in range(100):
                    ask(engine, "z", 100, policy="next-gate", sampling=SAMPLED)
            except LocalMoeError as error:
                ended.append(error)

        thread = threading.Thread(target=answer)
        thread.start()
        assert begun.wait(20)
        time.sleep(0.05)
        engine.close()
        thread.join(20)
        assert not thread.is_alive() and "closed" in str(ended[0]), ended
        assert store.num_bytes == 0
        monkeypatch.setattr(DiskReader, "_fill", fill)


def test_closing_frees_threads_files_and_memory(folder: Path, home: Path) -> None:
    def open_files() -> int:
        return sum("records" in found.path for found in psutil.Process().open_files())

    before = threading.active_count()
    for _ in range(2):
        engine = load_from_disk(folder, draft_length=0)
        ask(engine, "z", 4)
        store = store_of(engine)
        assert open_files() > 0
        engine.close()
        engine.close()
        assert open_files() == 0 and store.num_bytes == 0
    assert threading.active_count() <= before


def test_random_weights_lie_there_for_one_load_alone(home: Path) -> None:
    shape = tiny_shape("qwen2_moe")
    settings = EngineConfig(device="cpu", cpu_threads=2, draft_length=0)
    prompt = tuple(range(7, 60, 3))
    with Engine.load_shape(shape, settings, SyntheticSettings()) as engine:
        expected = ask_ids(engine, prompt, 8).tokens
        budget = 8 * page_bytes(engine)
    settings = replace(settings, experts_on="disk", ram_budget_bytes=budget)
    with Engine.load_shape(shape, settings, SyntheticSettings()) as engine:
        assert engine.plan.ram_experts == 8 and len(files_in(home)) == 1
        answer = ask_ids(engine, prompt, 8)
        check_disk(engine, answer)
        assert answer.tokens == expected and answer.stats.disk_bytes > 0
    assert files_in(home) == []


def test_a_load_of_random_weights_that_fails_leaves_no_file(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(num_bytes: int) -> None:
        raise BudgetError("The system refuses so much.")

    monkeypatch.setattr(ram_arena, "anonymous_memory", refuse)
    settings = EngineConfig(device="cpu", draft_length=0, experts_on="disk")
    with pytest.raises(BudgetError, match="refuses"):
        Engine.load_shape(tiny_shape("qwen2_moe"), settings, SyntheticSettings())
    assert files_in(home) == []


def test_what_killed_processes_left_of_any_model_goes_with_the_next_load(folder: Path, home: Path) -> None:
    """It may be what fills the disk, of a model that nobody loads again; an id may be another process's by
    now, or this one's, as in containers."""
    gone = max(psutil.pids()) + 10_000
    running = psutil.Process(os.getppid())
    marks = f"{running.pid}-{int(running.create_time() * 1000)}", f"{gone}-1", f"{os.getpid()}-1"
    places = (home / "drafts" / "other-000000000000", home / "synthetic")
    for place in places:
        place.mkdir(parents=True)
        for mark in marks:
            (place / f".experts-plain-bfloat16.records.{mark}-0.part").write_bytes(b"x")
    emptied = home / "drafts" / "gone-000000000000"
    emptied.mkdir()
    (emptied / f".experts-plain-bfloat16.records.{marks[1]}-0.part").write_bytes(b"x")
    for _ in range(2):
        with load_from_disk(folder, draft_length=0):
            left = [path.name for path in files_in(home) if path.suffix == ".part"]
            assert not emptied.exists()
            assert left == 2 * [f".experts-plain-bfloat16.records.{marks[0]}-0.part"]


@pytest.mark.slow
def test_two_of_one_shape_have_a_file_each(home: Path) -> None:
    settings = EngineConfig(device="cpu", cpu_threads=2, draft_length=0, experts_on="disk")
    shape, prompt = tiny_shape("qwen2_moe"), tuple(range(7, 60, 3))
    with Engine.load_shape(shape, settings, SyntheticSettings(seed=1)) as first:
        with Engine.load_shape(shape, settings, SyntheticSettings(seed=2)) as second:
            assert len(files_in(home)) == 2
            expected = ask_ids(second, prompt, 8).tokens
        assert len(files_in(home)) == 1
        assert ask_ids(first, prompt, 8).tokens != expected
    assert files_in(home) == []


def test_what_a_killed_process_left_of_random_weights_goes_with_the_next_load(home: Path) -> None:
    gone = max(psutil.pids()) + 10_000
    settings = EngineConfig(device="cpu", cpu_threads=2, draft_length=0, experts_on="disk")
    with Engine.load_shape(tiny_shape("qwen2_moe"), settings, SyntheticSettings()):
        (file,) = files_in(home)
        left = file.with_name(file.name.replace(f".{os.getpid()}-", f".{gone}-"))
        left.write_bytes(b"x")
        with Engine.load_shape(tiny_shape("qwen2_moe"), settings, SyntheticSettings()):
            assert not left.exists() and file.exists()
