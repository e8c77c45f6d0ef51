"""NF4 drafts from end to end: built, chosen, planned, computed with in both kinds of passes, replaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import ROOMY, ask, check_stats
from torch import Tensor

from localmoe.core.config import EngineConfig
from localmoe.core.draft_config import DraftForm, DraftSettings, GptqSettings, nf4_settings
from localmoe.core.errors import DraftError
from localmoe.engine import Engine, drafting, plan_model
from localmoe.engine.drafting import build_draft
from localmoe.engine.drafts import HostExpertSource, load_draft, replace_draft
from localmoe.engine.sources import CheckpointSource
from localmoe.kernels.codes import dequantize
from localmoe.kernels.lowbit import LowBitExperts
from localmoe.model.footprint import measure_footprint
from localmoe.quant.nf4 import quantize_nf4

# not importorskip: every worker would import it, and torch's compiler with it, to collect these tests
pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
Tiny = Callable[[str], tuple[Path, Any]]
CPU = torch.device("cpu")
PROMPT = "hello world, this is a test"
DRAFTING = EngineConfig(vram_budget_bytes=ROOMY, device="cpu", draft_length=4)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home of localmoe's."""
    monkeypatch.setenv("LOCALMOE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def rounded(folder: Path, **gptq: Any) -> Path:
    return build_draft(str(folder), settings=DraftSettings("rtn", GptqSettings(**gptq)))


def gptq(folder: Path) -> Path:
    settings = GptqSettings(num_tokens=256, sequence_length=32)
    return build_draft(str(folder), settings=DraftSettings("gptq", settings, device="cpu"))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("architecture", ["qwen2_moe", "gpt_oss", "deepseek_v2"])
def test_answers_drafted_by_nf4_are_those_of_plain_decoding(
    architecture: str, tiny: Tiny, home: Path
) -> None:
    folder = tiny(architecture)[0]
    assert build_draft(str(folder), settings=nf4_settings()).name == "nf4-g64"
    with Engine.load(str(folder), DRAFTING) as engine:
        assert str(engine.info().draft) == "NF4, group 64"
        assert engine.device_memory()["draft"] == engine.plan.draft_bytes
        plain = ask(engine, PROMPT, 24, draft_length=0)
        drafted = ask(engine, PROMPT, 24, draft_length=4)
        check_stats(drafted)
        assert drafted.tokens == plain.tokens and drafted.stats.acceptance_rate > 0.2
        assert engine.why_no_better_draft() == ""
    assert [path.name for path in home.rglob("*-g*")] == ["nf4-g64"], "nothing else was built"


@pytest.mark.slow
def test_nf4_ranks_between_gptq_and_rounding_and_is_planned_for(tiny: Tiny, home: Path) -> None:
    folder = tiny("olmoe")[0]

    def loaded() -> str:
        with Engine.load(str(folder), DRAFTING) as engine:
            assert engine.device_memory()["draft"] <= engine.plan.draft_bytes
            assert ask(engine, PROMPT, 8).stats.accepted > 0
            return str(engine.info().draft)

    rounded(folder)
    assert loaded() == "INT4 RTN, group 128"
    few = plan_model(str(folder), DRAFTING)[1].draft_bytes
    nf4 = build_draft(str(folder), settings=nf4_settings())
    assert loaded() == "NF4, group 64"
    assert plan_model(str(folder), DRAFTING)[1].draft_bytes == few * (64 + 8) * 2 // (64 + 4)
    best = gptq(folder)
    assert loaded() == "INT4 GPTQ, group 128" and plan_model(str(folder), DRAFTING)[1].draft_bytes == few
    weights = max(best.glob("*.safetensors"))
    data = weights.read_bytes()
    weights.write_bytes(data[:-1])
    assert loaded() == "NF4, group 64", "headers tell that it is damaged, before memory is planned"
    weights.write_bytes(data)
    name = "model.layers.2.mlp.experts.7.down_proj.scales"
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start = 8 + int.from_bytes(data[:8], "little") + header[name]["data_offsets"][0]
    weights.write_bytes(data[:start] + b"\xff\xff" + data[start + 2 :])  # a scale that is NaN
    assert loaded() == "INT4 RTN, group 128", "NF4 takes more memory than was planned"
    shutil.rmtree(best)
    file = max(nf4.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    assert loaded() == "INT4 RTN, group 128"


def test_the_plan_knows_the_bytes_of_every_form_and_device(tiny: Tiny) -> None:
    skeleton = CheckpointSource.open(str(tiny("gpt_oss")[0])).skeleton(torch.float32)

    def draft_bytes(form: DraftForm | None, device: Any) -> int:
        return measure_footprint("tiny", torch.bfloat16, skeleton, form, device).draft_expert_bytes

    weights = 3 * 128 * 128
    nf4 = DraftForm(4, 64, codebook=True)
    assert draft_bytes(None, "cuda") == draft_bytes(None, "cpu") == weights // 2 + weights // 128 * 4
    assert draft_bytes(nf4, "cpu") == weights + weights // 64 * 8
    packed = LowBitExperts.empty(1, 128, 128, 4, 64, "meta", codebook=True)
    assert draft_bytes(nf4, "cuda") == packed.num_bytes == weights // 2 + weights // 64 * 4 + 2 * 64


class Loaded:
    """A tiny model and its draft in the GPU's layout."""

    def __init__(self, folder: Path, draft: Path) -> None:
        source = CheckpointSource.open(str(folder))
        self.skeleton = source.skeleton(torch.float32)
        store = source.load_weights(self.skeleton, CPU, progress=None, cancel=None)
        self.experts = HostExpertSource(self.skeleton, store)
        self.base = source.draft_base(self.skeleton, store)
        self.info, layers = load_draft(draft, self.skeleton, CPU, base=self.base, packed=True)
        self.layers: Any = layers

    def replace(self, draft: Path) -> Any:
        return replace_draft(draft, self.skeleton, CPU, self.layers, self.base, lambda: None)

    def values(self) -> list[Tensor]:
        return [value for layer in self.layers for expert in (0, 7) for value in layer.dequantize(expert)]


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_the_gpus_layout_holds_blocks_of_input_features(architecture: str, tiny: Tiny, home: Path) -> None:
    folder = tiny(architecture)[0]
    loaded = Loaded(folder, build_draft(str(folder), settings=nf4_settings()))
    assert str(loaded.info) == "NF4, group 64"
    for layer, packed in enumerate(loaded.layers):
        for expert in (0, 7):
            weights = (weight.contiguous() for weight in loaded.experts.matrices(layer, expert))
            gate, up, down = (dequantize(quantize_nf4(weight), torch.float32) for weight in weights)
            found_gate_up, found_down = packed.dequantize(expert)
            assert torch.equal(found_gate_up, torch.cat([gate, up])) and torch.equal(found_down, down)


def test_a_gptq_draft_takes_the_place_of_nf4_in_the_same_memory(tiny: Tiny, home: Path) -> None:
    folder = tiny("qwen2_moe")[0]
    loaded = Loaded(folder, build_draft(str(folder), settings=nf4_settings()))
    better = gptq(folder)
    layer = loaded.layers[0]
    memory = [t.data_ptr() for t in (layer.gate_up.words, layer.gate_up.scales, layer.gate_up.codebooks)]
    assert str(loaded.replace(better)) == "INT4 GPTQ, group 128"
    assert memory == [
        t.data_ptr() for t in (layer.gate_up.words, layer.gate_up.scales, layer.gate_up.codebooks)
    ]
    assert all(map(torch.equal, loaded.values(), Loaded(folder, better).values()))
    other = rounded(folder, bits=8)
    before = loaded.values()
    with pytest.raises(DraftError, match=r"is INT8 RTN, group 128 and cannot .*: load the model again\.$"):
        loaded.replace(other)
    assert all(map(torch.equal, loaded.values(), before))
    integers = Loaded(folder, better)
    with pytest.raises(DraftError, match="NF4, group 64 and cannot take the place of one in groups of 128"):
        integers.replace(build_draft(str(folder), settings=nf4_settings()))


def test_nf4_asks_for_bitsandbytes_before_weights_are_read(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise DraftError("There is none.")

    monkeypatch.setattr(drafting, "bitsandbytes_functional", missing)
    monkeypatch.setattr(drafting, "load_weights", lambda *args, **rest: pytest.fail("weights are read"))
    with pytest.raises(DraftError, match="There is none"):
        build_draft(str(tiny("olmoe")[0]), tmp_path / "draft", nf4_settings())
