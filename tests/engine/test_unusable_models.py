"""What cannot be loaded is refused in one sentence that names the trouble, and nothing is left behind."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.engines import ROOMY, ask
from support.tokenizer import VOCAB_SIZE, write_tokenizer

from localmoe.core.config import EngineConfig, SamplingConfig
from localmoe.core.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    LocalMoeError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from localmoe.core.home import localmoe_home
from localmoe.core.types import Message
from localmoe.engine import Engine

Tiny = Callable[[str], tuple[Path, Any]]
CONFIG = EngineConfig(vram_budget_bytes=ROOMY)


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    """A model folder to be spoiled."""
    return Path(shutil.copytree(tiny("qwen2_moe")[0], tmp_path / "spoiled"))


def everything_in(*folders: Path) -> dict[Path, bytes]:
    files = (path for folder in folders for path in folder.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files}


def check_refused(folder: Path, kind: type[LocalMoeError], words: str) -> None:
    """One sentence; no file made or changed; no thread left."""
    before, threads = everything_in(folder, localmoe_home()), threading.active_count()
    with pytest.raises(kind, match=words) as refusal:
        Engine.load(str(folder), CONFIG)
    message = str(refusal.value)
    assert "\n" not in message and message.endswith((".", ")")) and len(message) < 600, message
    assert everything_in(folder, localmoe_home()) == before
    assert threading.active_count() == threads


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
ATTENTION = "model.layers.2.self_attn.k_proj.weight"
ROUTER = "model.layers.0.mlp.gate.weight"


@pytest.mark.parametrize(
    ("name", "module"), [(EXPERT, "model.layers.1.mlp.experts"), (ATTENTION, ATTENTION), (ROUTER, ROUTER)]
)
def test_a_missing_tensor_is_named(folder: Path, name: str, module: str) -> None:
    def remove(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    change_weights(folder, remove)
    check_refused(folder, CheckpointError, f"missing.*{module}")


@pytest.mark.parametrize("name", [EXPERT, ATTENTION, ROUTER])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path, name: str) -> None:
    wrong: list[int] = []

    def halve(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][::2].contiguous()
        wrong.extend(tensors[name].shape)

    change_weights(folder, halve)
    check_refused(
        folder, CheckpointError, rf"{name}.*has shape \[{wrong[0]}, {wrong[1]}\].*expects \[{2 * wrong[0]}, "
    )


def test_an_expert_too_many_is_refused(folder: Path) -> None:
    extra = EXPERT.replace("experts.3", "experts.8")
    change_weights(folder, lambda tensors: tensors.update({extra: tensors[EXPERT].clone()}))
    check_refused(folder, CheckpointError, "experts.8")


@pytest.mark.parametrize("bytes_left", [0, 5, 100, 100_000, -1])
def test_a_truncated_weight_file_is_named(folder: Path, bytes_left: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:bytes_left])
    check_refused(folder, CheckpointError, r"model\.safetensors")


def test_weights_of_another_type_are_refused(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({EXPERT: tensors[EXPERT].to(torch.float8_e4m3fn)}))
    check_refused(folder, CheckpointError, "F8_E4M3")


def test_a_dense_model_is_refused_as_such(tmp_path: Path) -> None:
    config = transformers.Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path / "dense")
    write_tokenizer(tmp_path / "dense")
    check_refused(tmp_path / "dense", UnsupportedModelError, "dense")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, r"quantised \(awq\).*of 16 bits or in FP8"),
        (
            {"quantization_config": {"quant_method": "awq", "modules_to_not_convert": []}},
            r"quantised \(awq\)",
        ),
        ({"quantization_config": {"bits": 4}}, r"quantised \(unknown\)"),
        ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, r"quantised \(fp8, e5m2\)"),
        ({"quantization_config": {"quant_method": "fp8"}, "expert_dtype": "fp4"}, r"\(fp8, fp4\)"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
            r"\(compressed-tensors, pack-quantized\)",
        ),
        ({"quantization_config": "mxfp4"}, "quantised"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}, "Python code of its own"),
        ({"model_type": "no_such_architecture"}, "no_such_architecture"),
        ({"model_type": None}, "."),
        ({"model_type": "clip"}, "."),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"num_hidden_layers": 5}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "."),
        ({"num_experts": 0}, "."),
        ({"moe_intermediate_size": 0}, r"shape \[8, 0, 128\] and \[8, 128, 0\], which are none"),
        ({"max_position_embeddings": 7}, "made for 7 tokens of context, and 16 are the least"),
        ({"max_position_embeddings": -1}, "made for -1 tokens"),
        ({"num_experts_per_tok": 99}, "."),
        ({"num_experts_per_tok": 0}, r"uses 0 of 8 experts \(num_experts_per_tok\)"),
        ({"num_experts_per_tok": -1}, "uses -1 of 8 experts"),
        ({"hidden_act": "no_such_function"}, "."),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_that_cannot_be_served_is_refused(folder: Path, values: dict[str, Any], words: str) -> None:
    (folder / "modeling_evil.py").write_text("raise SystemExit('code of the model ran')")
    change_config(folder, **values)
    check_refused(folder, LocalMoeError, words)


@pytest.mark.parametrize("window", [None, 2**63])
def test_a_window_that_no_cache_can_have_is_refused(window: int | None, tiny: Tiny, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny("gpt_oss")[0], tmp_path / "spoiled"))
    change_config(folder, sliding_window=window)
    check_refused(folder, UnsupportedModelError, "cannot build the cache of this gpt_oss model")


def test_a_config_of_more_layers_than_there_are_weights_is_refused(folder: Path) -> None:
    change_config(folder, num_hidden_layers=5, layer_types=["full_attention"] * 5)
    check_refused(folder, CheckpointError, r"missing.*layers\.[34]")


@pytest.mark.parametrize("damage", ["none", "no json", "empty json", "foreign json"])
def test_a_model_without_a_readable_tokenizer_is_refused_before_weights_are_read(
    folder: Path, damage: str
) -> None:
    (folder / "tokenizer_config.json").unlink()
    texts = {"no json": "{", "empty json": "{}", "foreign json": '{"model": {"type": "Imaginary"}}'}
    if damage == "none":
        (folder / "tokenizer.json").unlink()
    else:
        (folder / "tokenizer.json").write_text(texts[damage])
    reports: list[object] = []
    with pytest.raises(CheckpointError, match="tokenizer") as refusal:
        Engine.load(str(folder), CONFIG, progress=reports.append)
    assert not reports
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 600


def test_what_is_no_model_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    check_refused(tmp_path / "empty", ModelNotFoundError, "config.json")
    check_refused(tmp_path / "absent", ModelNotFoundError, "absent")
    for name in ("no/such/model", "", "../..", "gpt2:latest"):
        with pytest.raises(LocalMoeError):
            Engine.load(name, CONFIG)


@pytest.mark.parametrize(
    "values",
    [{"draft_length": -1}, {"draft_length": 65}, {"context": 3}, {"vram_budget_bytes": 0}, {"policy": "lru"},
     {"context": 10_000}, {"emulated_link_bytes_per_s": -1.0}],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused(tiny: Tiny, values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        Engine.load(str(tiny("qwen2_moe")[0]), EngineConfig(**values))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "values", [{"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 2.0}, {"seed": -1}], ids=str
)
def test_sampling_settings_out_of_range_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        SamplingConfig(**values)


def test_prompts_that_cannot_be_answered_are_refused_and_the_next_one_is_answered(
    tiny_engine: Callable[[str], Engine],
) -> None:
    engine = tiny_engine("qwen2_moe")
    with pytest.raises(ContextLengthError, match="context holds 512"):
        ask(engine, "x" * 512)
    with pytest.raises(ContextLengthError):
        ask(engine, [Message("user", "x" * 600)])
    with pytest.raises(ConfigError, match="empty"):
        ask(engine, "")
    assert len(ask(engine, "x" * 511, 10).tokens) == 1, "the last token that fits"


@pytest.mark.parametrize("length", [0, 4])
def test_weights_that_are_no_numbers_end_an_answer_with_a_sentence(folder: Path, length: int) -> None:
    """The likeliest of them would be token 0, and the answer would seem to be over."""
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    weights["model.norm.weight"].fill_(torch.nan)
    save_file(weights, path, {"format": "pt"})
    with Engine.load(str(folder), CONFIG) as engine:
        for _ in range(2):
            with pytest.raises(CheckpointError, match="files may be damaged"):
                ask(engine, "Hello", 5, draft_length=length)
