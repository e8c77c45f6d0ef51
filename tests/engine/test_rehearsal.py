"""Compiling on a twin of the model while weights are read: it sees what the model will launch, and never
stands in the way of a load."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny_models import ARCHITECTURES, UNGATED_ARCHITECTURE, tiny_model, write_model

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction

from localmoe.core.config import EngineConfig
from localmoe.core.draft_config import DraftForm
from localmoe.core.errors import LoadCancelledError
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.engine import device_parts, rehearsal
from localmoe.engine.loading import assemble
from localmoe.engine.planning import PreparedModel, prepare_model
from localmoe.engine.rehearsal import Rehearsal, lane_is_likely, rehearsing
from localmoe.engine.settings import ComputeSettings
from localmoe.engine.twin import Twin
from localmoe.experts.host_store import HostStore
from localmoe.experts.lane_code import LaneCode
from localmoe.kernels.gpu import compiled_stamp
from localmoe.kernels.gpu.compiled_stamp import CompiledStamp
from localmoe.kernels.gpu.launch import CompilingStopped
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model import device_stamp
from localmoe.model.device_cache import DeviceKVCache
from localmoe.model.device_passes import DevicePasses
from localmoe.model.device_runner import DeviceRunner
from localmoe.model.device_window import DeviceWindow
from localmoe.model.synthetic import SyntheticModel

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")
# a draft is asked for: whether another test has left one behind says nothing
CONFIG = EngineConfig(device="cpu", context=160, draft_length=4)
PLAIN = replace(CONFIG, draft_length=0)
ROOT = Path(__file__).resolve().parents[2]
Launches = set[tuple[Any, ...]]


def prepared_for_kernels(
    folder: Path, architecture: str, config: EngineConfig = PLAIN, **changes: Any
) -> PreparedModel:
    """A tiny model, prepared as if its passes ran whole on a GPU."""
    path = write_model(folder / architecture, tiny_model(architecture, dtype=torch.float16, **changes))
    prepared = prepare_model(str(path), config)
    compute = ComputeSettings(torch.device("cpu"), torch.float16, whole_passes=True)
    skeleton = replace(
        prepared.source.skeleton(torch.float16), host_embedding=prepared.skeleton.host_embedding
    )
    return replace(prepared, skeleton=skeleton, compute=compute)


def as_compiled(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """What makes Triton compile a kernel anew: types, constants, numbers that are 1 or multiples of 16."""
    names = list(kernel.arg_names)
    plain = [names[i] if isinstance(i, int) else i for i in kernel.kwargs["do_not_specialize"] or ()]
    found: list[Any] = []
    for name, arg in [*zip(names, args, strict=False), *sorted(options.items())]:
        if isinstance(arg, torch.Tensor):
            found.append((name, arg.dtype, arg.data_ptr() % 16 == 0))
        elif type(arg) is int and name in names[: len(args)]:
            special = (arg == 1, arg % 16 == 0) if name not in plain else ()
            found.append((name, arg.bit_length() > 31, *special))
        else:
            found.append((name, arg))
    return (kernel.fn.__name__, *found)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What is compiled during the test."""
    found: Launches = set()

    def warmup(self: Any, *args: Any, grid: Any, **options: Any) -> None:
        found.add(as_compiled(self, args, options))

    monkeypatch.setattr(InterpretedFunction, "warmup", warmup)
    return found


@pytest.mark.slow(but=1)
@pytest.mark.interpreted
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, UNGATED_ARCHITECTURE])
def test_a_twin_launches_what_the_model_does(
    architecture: str, tmp_path: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    types = {"layer_types": ["sliding_attention", "full_attention"] * 3} if architecture == "gpt_oss" else {}
    prepared = prepared_for_kernels(tmp_path, architecture, CONFIG, num_hidden_layers=6, **types)
    if architecture == "olmoe":  # as if its routing were simulated
        routed = SyntheticSettings(parse_routing("uniform"), match=0.9, acceptance=0.9)
        prepared = replace(prepared, synthetic=SyntheticModel(routed, 6, 8, 3))
    twin = Twin.of(prepared, DraftForm(), lane=True)
    assert int(twin.prepared.skeleton.text_config.num_hidden_layers) < 6

    def make_lane(skeleton: Any, store: HostStore, *others: Any) -> tuple[Any, str]:
        lane = replace(twin, prepared=prepared)._lane(store)
        lane.close = lambda: None  # type: ignore[method-assign]
        return lane, "VRAM, PCIe and CPU"

    monkeypatch.setattr(device_parts, "make_lane", make_lane)
    monkeypatch.setattr(DeviceRunner, "prepare", lambda self: self.issue.compile())
    assemble(prepared, CONFIG, progress=None, cancel=None).close()
    wanted = set(launches)
    # each takes a third of a second: row counts alone make no other kernels
    assert 30 < len(wanted) <= 70 and {"_post", "_choose"} <= {launch[0] for launch in wanted}
    launches.clear()
    twin.compile_passes(threading.Event())
    assert launches == wanted
    assert all(tensor.is_meta for tensor in twin.prepared.skeleton.model.parameters())


def test_a_twin_is_small_beside_its_model(tmp_path: Path) -> None:
    prepared = prepared_for_kernels(tmp_path, "mixtral", num_hidden_layers=8)
    twin = Twin.of(prepared, None, lane=False)
    store = twin._store()
    record = store.layouts[0].num_bytes(store.dtype)
    assert (store.num_layers, store.num_experts) == (2, 8)
    assert {int(at) for at in store.device_addresses().ravel()} == {
        store._layers[layer].data_ptr() for layer in range(2)
    }
    assert all(layer.untyped_storage().nbytes() == record for layer in store._layers)
    assert Twin.of(prepared, None, lane=True).num_bytes == twin.num_bytes
    grown = replace(prepared, plan=replace(prepared.plan, kv_bytes=prepared.plan.kv_bytes + 800))
    assert Twin.of(grown, None, lane=True).num_bytes == twin.num_bytes + 200


@pytest.mark.interpreted
@pytest.mark.parametrize("compiled", [False, True])
def test_passes_are_gone_through_to_compile_unless_that_was_done(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepared_for_kernels(tmp_path, "mixtral", num_hidden_layers=1)
    events: list[str] = []
    monkeypatch.setattr(DevicePasses, "compile", lambda self: events.append("compile"))
    monkeypatch.setattr(DevicePasses, "_run_windows", lambda self: events.append("run") or 1 / 0)
    monkeypatch.setattr(device_parts, "_prepare", lambda runner, name: None)
    runner = assemble(prepared, PLAIN, progress=None, cancel=None).runner
    assert isinstance(runner, DeviceRunner)
    assert runner.issue.compiled, "on a CPU there is nothing to compile"
    runner.issue.compiled = compiled
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            runner.prepare()
    assert events == (["run", "run"] if compiled else ["compile", "run", "run"])


class Issue:
    """Passes that are prepared, or fail at it."""

    def __init__(self, fails: bool = False) -> None:
        self.compiled = False
        self.fails = fails
        self.asked: list[bool] = []

    def prepare(self) -> None:
        self.asked.append(self.compiled)
        if self.fails:
            raise RuntimeError("a pass failed")


def runner_with(issue: Issue, stamp: Any) -> DeviceRunner:
    sequence = DeviceKVCache(1, 16, DeviceWindow(1, torch.device("cpu")))
    memory = SimpleNamespace(copy_s=None, store=SimpleNamespace(num_experts=8))
    passes = SimpleNamespace(lane=None, memory=memory, experts_per_token=2)
    return DeviceRunner(issue, sequence, passes, stamp)  # type: ignore[arg-type]


def test_a_stamp_is_left_once_passes_ran_and_spares_the_next_start_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    stamp = CompiledStamp({}, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="a pass failed"):
        runner_with(Issue(fails=True), stamp).prepare()
    assert not stamp.is_there()
    first, second, without = Issue(), Issue(), Issue()
    runner_with(first, stamp).prepare()
    assert stamp.is_there()
    runner_with(second, stamp).prepare()
    runner_with(without, None).prepare()
    assert (first.asked, second.asked, without.asked) == ([False], [True], [False])
    rehearsed = Issue()
    rehearsed.compiled = True
    runner_with(rehearsed, CompiledStamp({"other": 1}, torch.device("cpu"))).prepare()
    assert rehearsed.asked == [True] and len(list(tmp_path.iterdir())) == 2


def fake_twin(compile_passes: Callable[[threading.Event], None], lane: bool = False) -> Any:
    def compile_lane(stop: threading.Event) -> None:
        raise RuntimeError("no compiler")

    prepared = SimpleNamespace(compute=SimpleNamespace(device=torch.device("cpu")))
    return SimpleNamespace(
        prepared=prepared, lane=lane, compile_passes=compile_passes, compile_lane=compile_lane
    )


def rehearsals() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rehearse")]


def until_stopped(stop: threading.Event) -> None:
    assert stop.wait(60)
    raise CompilingStopped("stopped")


def test_nothing_is_rehearsed_on_a_cpu(tmp_path: Path) -> None:
    prepared = prepared_for_kernels(tmp_path, "mixtral")
    with rehearsing(prepared, CONFIG) as found:
        assert not rehearsals() and not found.wait()


def test_what_was_compiled_is_told_and_what_failed_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken(stop: threading.Event) -> None:
        raise AttributeError("no such module")

    caplog.set_level(logging.INFO, "localmoe")
    assert Rehearsal(fake_twin(lambda stop: None)).wait() and not caplog.records
    assert not Rehearsal(fake_twin(broken)).wait()
    assert "compiling passes ahead ended early: no such module" in caplog.text
    assert Rehearsal(fake_twin(lambda stop: None, lane=True)).wait(), "without the CPU lane's code"
    assert "compiling cpu-lane ahead ended early: no compiler" in caplog.text
    assert not rehearsals()


def test_a_twin_that_cannot_be_made_is_only_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> Twin:
        raise KeyError("layer_types")

    caplog.set_level(logging.INFO, "localmoe")
    monkeypatch.setattr(rehearsal, "_missing_stamp", broken)
    with rehearsing(None, CONFIG) as found:  # type: ignore[arg-type]
        assert not found.wait()
    assert "not compiled while weights are read" in caplog.text and "layer_types" in caplog.text


def rehearsed(
    prepared: PreparedModel, config: EngineConfig, monkeypatch: pytest.MonkeyPatch, fails: bool = False
) -> Twin | None:
    """The twin that is rehearsed while this model is loaded, which may fail."""
    twins: list[Twin | None] = []

    class Noted(Rehearsal):
        def __init__(self, twin: Twin | None) -> None:
            twins.append(twin)
            super().__init__(twin and fake_twin(lambda stop: None))

    monkeypatch.setattr(rehearsal, "Rehearsal", Noted)
    with suppress(RuntimeError), rehearsing(prepared, config):
        if fails:
            raise RuntimeError("loading failed")
    return twins[0]


def test_a_twin_is_rehearsed_where_kernels_are_missing_and_memory_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(compiled_stamp, "_device_facts", lambda device: ["a GPU"])
    config = replace(CONFIG, cpu_threads=4)
    prepared = prepared_for_kernels(tmp_path, "mixtral", config)
    compute = replace(prepared.compute, device=torch.device("cuda"))
    roomy = replace(prepared.plan, num_slots=3, slot_bytes=1 << 30)
    model = replace(prepared, compute=compute, plan=roomy)
    found = rehearsed(model, config, monkeypatch, fails=True)
    assert found is not None and found.draft == DraftForm() and found.lane
    tight = replace(roomy, slot_bytes=found.num_bytes - roomy.kv_bytes - 1)
    assert rehearsed(replace(model, plan=tight), config, monkeypatch) is None
    assert rehearsed(
        replace(model, plan=replace(tight, slot_bytes=tight.slot_bytes + 1)), config, monkeypatch
    )
    assert rehearsed(model, config, monkeypatch) is None, "the stamp of the load before"
    layered = replace(compute, whole_passes=False)
    assert rehearsed(replace(model, compute=layered), replace(config, strict=True), monkeypatch) is None
    undrafted = replace(model, plan=replace(roomy, drafting=False))
    strict = rehearsed(undrafted, replace(config, strict=True), monkeypatch)
    assert strict is not None and strict.draft is None and not strict.lane


@pytest.mark.interpreted
def test_a_loaded_model_has_the_stamp_that_was_looked_for_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepared_for_kernels(tmp_path, "qwen2_moe", CONFIG)
    asked: list[Path] = []
    original = device_stamp.stamp_of
    monkeypatch.setattr(device_stamp, "stamp_of", lambda *args, **told: note(original(*args, **told)))
    monkeypatch.setattr(device_parts, "_prepare", lambda runner, name: None)

    def note(found: Any) -> Any:
        asked.append(found.path)
        return found

    form = prepared.source.draft_form(None)
    config = prepared.skeleton.model.config
    device_stamp.stamp_of(
        config, torch.float16, torch.device("cpu"),
        context=prepared.plan.context, draft=form, form=WeightForm.PLAIN, lane=False, synthetic=None,
    )  # fmt: skip
    assemble(prepared, CONFIG, progress=None, cancel=None).close()
    assert len(asked) == 2 and asked[0] == asked[1]


@pytest.mark.parametrize("moment", ["reading", "waiting"])
def test_a_load_that_fails_or_is_cancelled_leaves_no_thread(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepared, cancel = prepared_for_kernels(tmp_path, "mixtral"), threading.Event()
    closed: list[HostStore] = []
    close = HostStore.close
    monkeypatch.setattr(HostStore, "close", lambda self: (closed.append(self), close(self)))
    monkeypatch.setattr(rehearsal, "_missing_stamp", lambda *arguments: "a stamp")
    monkeypatch.setattr(rehearsal, "_twin", lambda *arguments: fake_twin(until_stopped))
    caplog.set_level(logging.INFO, "localmoe")

    def report(progress: Any) -> None:
        assert rehearsals()
        if moment == "reading":
            raise OSError("the disk is gone")
        if progress.done == progress.total:
            cancel.set()

    error: type[Exception] = OSError if moment == "reading" else LoadCancelledError
    with pytest.raises(error):
        assemble(prepared, PLAIN, progress=report, cancel=cancel)
    assert not rehearsals() and closed and not caplog.records


def test_the_cpu_lanes_code_is_prepared_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, found = prepared_for_kernels(tmp_path, "gpt_oss"), []
    monkeypatch.setattr(LaneCode, "prepare", lambda self, stop: found.append((self, stop)))
    stop = threading.Event()
    Twin.of(prepared, None, lane=True).compile_lane(stop)
    ((code, given),) = found
    assert code.layout == prepared.skeleton.experts[0].layout and code.layout.transposed and given is stop
    assert code.activation.interleaved and code.dtype == prepared.source.stored_dtype


@pytest.mark.parametrize(
    ("settings", "likely"),
    [
        ({}, True), ({"strict": True}, False), ({"lanes": "vram+link"}, False), ({"cpu_threads": 1}, False),
        ({"cpu_threads": 1, "lanes": "all"}, True),
    ],
)  # fmt: skip
def test_the_cpu_lane_is_rehearsed_where_it_will_be_tried(
    settings: dict[str, Any], likely: bool, tmp_path: Path
) -> None:
    prepared, config = prepared_for_kernels(tmp_path, "mixtral"), {"cpu_threads": 4, **settings}
    assert not lane_is_likely(prepared, replace(CONFIG, **config)), "it helps a GPU"
    prepared = replace(prepared, compute=replace(prepared.compute, device=torch.device("cuda")))
    assert lane_is_likely(prepared, replace(CONFIG, **config)) == likely


REHEARSED = """
import sys
from dataclasses import replace
from triton import knobs
from localmoe.core.config import EngineConfig, GenerationRequest
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.engine import Engine
from localmoe.engine.rehearsal import Rehearsal
from localmoe.model.device_passes import DevicePasses
from localmoe.model.shapes import find_shape

name, layers = sys.argv[1], int(sys.argv[2])
done, told = [], {}
knobs.runtime.jit_post_compile_hook = lambda **said: done.append(said["fn"].name)

def counted(kind, method, key):
    usual = getattr(kind, method)
    def run(self, *args):
        before = len(done)
        found = usual(self, *args)
        told.setdefault(key, []).append((found, done[before:]))
        return found
    setattr(kind, method, run)

counted(DevicePasses, "prepare", "prepare")
counted(DevicePasses, "compile", "compile")
counted(DevicePasses, "stream", "stream")
counted(Rehearsal, "wait", "wait")
shape = find_shape(name)
changes = {"num_hidden_layers": layers}
if "layer_types" in shape.dimensions:
    changes["layer_types"] = list(shape.dimensions["layer_types"])[:layers]
shape = replace(shape, dimensions={**shape.dimensions, **changes})
config = EngineConfig(device="cuda", context=1024, vram_budget_bytes=16 << 30)
for start in range(2):
    told.clear()
    with Engine.load_shape(shape, config, SyntheticSettings(parse_routing("uniform"), 0.9, 0.9)) as engine:
        compiled = engine._loaded.runner.issue.compiled
        for tokens in (20, 300):
            prompt = tuple(range(tokens))
            for event in engine.stream(GenerationRequest(prompt_token_ids=prompt, max_new_tokens=4)):
                pass
    rehearsed = told["wait"][-1][0]
    assert compiled and rehearsed == (start == 0), (compiled, told["wait"])
    assert ("compile" in told) == (start == 0), "only the twin is gone through, once"
    assert told["prepare"][0][1] == [], told["prepare"]
    assert told["stream"] and not any(kernels for _, kernels in told["stream"]), told["stream"]
"""


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen1.5-moe-a2.7b", "deepseek-v2-lite", "gpt-oss-20b"])
def test_after_a_rehearsal_a_start_compiles_nothing_more(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", REHEARSED, name, "6"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "triton")},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert list((tmp_path / "triton").glob("localmoe-*.compiled"))
