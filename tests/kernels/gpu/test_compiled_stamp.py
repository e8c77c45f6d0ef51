"""The note in Triton's cache that kernels are compiled: what it depends on; it is never in the way."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from localmoe.core.draft_config import DraftForm
from localmoe.core.synthetic import SyntheticSettings, parse_routing
from localmoe.kernels.gpu import compiled_stamp
from localmoe.kernels.gpu.compiled_stamp import CompiledStamp, sources_checksum
from localmoe.kernels.weight_forms import WeightForm
from localmoe.model.device_stamp import form_of, stamp_of
from localmoe.model.shapes import find_shape
from localmoe.model.synthetic import SyntheticModel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    return tmp_path / "triton"


def stamp(shape: str = "olmoe-1b-7b", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> CompiledStamp:
    found = find_shape(shape)
    config = replace(found, dimensions={**found.dimensions, **changes.pop("config", {})}).config()
    told = {"context": 4096, "draft": DraftForm(), "form": WeightForm.PLAIN, "lane": True, "synthetic": None}
    return stamp_of(config, dtype, CPU, **{**told, **changes})


def simulation(routing: str | None) -> SyntheticModel:
    spec = None if routing is None else parse_routing(routing)
    return SyntheticModel(SyntheticSettings(spec), 2, 8, 2)


def test_it_lies_in_tritons_cache_and_depends_on_all_that_decides_kernels(cache: Path) -> None:
    different = [
        stamp(), stamp("mixtral-8x7b"), stamp(dtype=torch.float16), stamp(context=8192), stamp(draft=None),
        stamp(draft=DraftForm(3)), stamp(draft=DraftForm(4, 64)), stamp(draft=DraftForm(4, 128, True)),
        stamp(lane=False), stamp(synthetic=simulation("uniform")), stamp(config={"hidden_size": 4096}),
        stamp(config={"num_experts": 32}), stamp(config={"rms_norm_eps": 1e-6}), stamp(form=WeightForm.MXFP4),
        stamp(form=WeightForm.BF12), stamp(packed=1), stamp(packed=2),
    ]  # fmt: skip
    paths = {one.path for one in different}
    assert len(paths) == len(different) and {path.parent for path in paths} == {cache}


def test_it_does_not_depend_on_names_tokens_and_how_weights_are_simulated() -> None:
    config = find_shape("olmoe-1b-7b").config()
    config._name_or_path = "/elsewhere/olmoe"
    config.architectures, config.eos_token_id = ["OlmoeForCausalLM"], 7
    again = stamp_of(
        config, torch.bfloat16, CPU,
        context=4096, draft=DraftForm(), form=WeightForm.PLAIN, lane=True, synthetic=simulation(None),
    )  # fmt: skip
    assert again.path == stamp().path


def test_other_code_another_device_or_another_triton_make_another_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c", "d"):
        (tmp_path / name / "kernels").mkdir(parents=True)
        (tmp_path / name / "kernels" / "one.py").write_text("x = 2\n" if name == "b" else "x = 1\n")
    (tmp_path / "c" / "kernels" / "two.py").write_text("")
    (tmp_path / "d" / "chat").mkdir()
    (tmp_path / "d" / "chat" / "prompt.py").write_text("y = 1\n")
    sums = [sources_checksum(tmp_path / name) for name in ("a", "b", "c", "d")]
    assert len(set(sums[:3])) == 3 and sums[0] == sums[3]
    paths = [CompiledStamp({}, CPU, tmp_path / name).path for name in ("a", "b")]
    monkeypatch.setattr(compiled_stamp, "_device_facts", lambda device: ["cuda", 9, 0])
    paths.append(CompiledStamp({}, CPU, tmp_path / "a").path)
    monkeypatch.setattr(compiled_stamp.triton, "__version__", "0.0")
    paths.append(CompiledStamp({}, CPU, tmp_path / "a").path)
    assert len(set(paths)) == 4


def test_the_sources_are_this_packages() -> None:
    package = Path(compiled_stamp.__file__).parents[2]
    assert package.name == "localmoe" and (package / "model" / "device_passes.py").is_file()
    assert CompiledStamp({}, CPU).path == CompiledStamp({}, CPU, package).path


def test_it_is_there_once_it_was_left_and_goes_with_the_cache(cache: Path) -> None:
    assert not stamp().is_there()
    stamp().leave()
    stamp().leave()
    assert stamp().is_there() and not stamp(context=8192).is_there()
    assert [path.name for path in cache.iterdir()] == [stamp().path.name]
    stamp().path.unlink()
    assert not stamp().is_there()


def test_a_file_that_was_not_finished_counts_for_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*paths: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            stamp().leave()
    assert len(list(cache.iterdir())) == 1 and not stamp().is_there()
    stamp().leave()
    assert stamp().is_there()


def test_a_cache_that_cannot_be_written_to_is_left_alone(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file, where a folder should be")
    stamp().leave()
    assert not stamp().is_there()
    monkeypatch.setattr(os, "getpid", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # what has nothing to do with the folder comes up
        stamp().leave()


def test_the_form_of_no_draft_is_none() -> None:
    assert form_of(None) is None and form_of([]) is None
