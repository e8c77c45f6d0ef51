"""NF4 drafts against bitsandbytes: the same bytes in files, the same values in memory; what is refused."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_samples import CONFIG, FINGERPRINT, NAMING, Source, names_in
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BitsAndBytesConfig

from localmoe.core.errors import DraftError
from localmoe.kernels.codebook import nf4_codebook
from localmoe.kernels.codes import CodeMatrix, dequantize
from localmoe.quant import DraftCancelledError, DraftCheckpoint, DraftProvenance, DraftWriter
from localmoe.quant.builder import build_nf4_draft, estimate_layout_bytes
from localmoe.quant.nf4 import bitsandbytes_functional, quantize_nf4
from localmoe.quant.nf4_layout import Nf4Layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODULE = "model.layers.1.mlp.experts.0.up_proj"
UP_SHAPE = (64, 128)


@pytest.fixture(scope="module")
def functional() -> Any:
    pytest.importorskip("bitsandbytes")
    return bitsandbytes_functional()


def nearest(weight: Tensor) -> CodeMatrix:
    """NF4 by the letter: of each 64 weights the codes next to weight / largest magnitude."""
    blocks = weight.float().view(-1, 64)
    absmax = blocks.abs().amax(1)
    codes = (blocks[:, :, None] / absmax[:, None, None] - nf4_codebook()).abs().argmin(2)
    shape = weight.shape
    scales = absmax.view(shape[0], -1)
    return CodeMatrix(codes.to(torch.uint8).view(shape), scales, shape[1], 64, 4, codebook=nf4_codebook())


def provenance(dtype: str = "bfloat16") -> DraftProvenance:
    return DraftProvenance.now("some/model", FINGERPRINT, "nf4", 64, settings={"dtype": dtype})


def source(**sizes: int) -> Source:
    return Source(**{"hidden": 128, "intermediate": 64, **sizes})


def write(out: Path, model: Source) -> Path:
    """A draft of `nearest` codes: no bitsandbytes needed."""
    with DraftWriter(out, CONFIG, NAMING, provenance(), 1000) as writer:
        for layer in range(model.num_layers):
            experts = [tuple(map(nearest, model.matrices(layer, e))) for e in range(model.num_experts)]
            writer.add_layer(model.decoder_layer(layer), experts)  # type: ignore[arg-type]
        return writer.publish()


@given(
    st.integers(1, 7), st.integers(1, 5), st.sampled_from(list(DTYPES)), st.floats(-30, 3),
    st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=25)
def test_bytes_and_values_are_those_of_bitsandbytes(
    functional: Any, rows: int, blocks: int, dtype: str, size: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(rows, 64 * blocks, generator=generator) * 10 ** (size / 5)).to(DTYPES[dtype])
    weight[0, :64] *= 0
    theirs, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    matrix, layout = quantize_nf4(weight), Nf4Layout(dtype)
    ours = layout.pack(matrix)
    expected = {"weight": theirs} | {f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}
    assert ours.keys() == expected.keys()
    for part, tensor in expected.items():
        assert ours[part].dtype == tensor.dtype and torch.equal(ours[part], tensor), part
    assert sum(tensor.nbytes for tensor in ours.values()) == layout.num_bytes(*weight.shape)
    back = layout.unpack(expected, (rows, 64 * blocks))
    assert torch.equal(back.codes, matrix.codes) and torch.equal(back.scales, matrix.scales)
    assert torch.equal(dequantize(back, DTYPES[dtype]), functional.dequantize_4bit(theirs, state))


def test_bitsandbytes_reads_a_draft_and_its_size_is_the_one_foretold(functional: Any, tmp_path: Path) -> None:
    model, told = source(num_experts=6, hidden=512, intermediate=256), []
    needed = estimate_layout_bytes(model, Nf4Layout())
    with DraftWriter(tmp_path / "draft", CONFIG, NAMING, provenance(), needed) as writer:
        build_nf4_draft(model, writer, progress=told.append)
        out = writer.publish()
    assert [report.done for report in told] == list(range(13))
    assert {report.stage for report in told} == {"Building the NF4 draft"}
    assert 0.95 * needed < sum(file.stat().st_size for file in out.iterdir()) < 1.05 * needed
    draft = DraftCheckpoint.open(out)
    assert (draft.bits, draft.group_size, draft.form.codebook) == (4, 64, True)
    assert draft.naming() == NAMING
    for layer in range(2):
        tensors = load_file(out / f"model-0000{layer + 1}-of-00002.safetensors")
        for expert in range(6):
            for name, weight in zip(("gate", "up", "down"), model.matrices(layer, expert), strict=True):
                prefix = f"model.layers.{layer + 1}.mlp.experts.{expert}.{name}_proj.weight"
                parts = {
                    n.removeprefix(prefix + "."): t for n, t in tensors.items() if n.startswith(prefix + ".")
                }
                state = functional.QuantState.from_dict(parts, torch.device("cpu"))
                theirs = functional.dequantize_4bit(tensors[prefix], state)
                assert theirs.dtype == torch.bfloat16 and theirs.shape == weight.shape
                found = draft.matrix(NAMING, layer + 1, expert, name, tuple(weight.shape))
                assert torch.equal(dequantize(found, torch.bfloat16), theirs)
                assert (theirs.float() - weight.float()).norm() < 0.11 * weight.float().norm()


def test_the_json_files_say_that_it_is_nf4(tmp_path: Path) -> None:
    out = write(tmp_path / "draft", source())
    quantization = json.loads((out / "quantize_config.json").read_text())
    assert json.loads((out / "config.json").read_text()) == {**CONFIG, "quantization_config": quantization}
    theirs = BitsAndBytesConfig.from_dict(dict(quantization))
    assert theirs.quantization_method() == "nf4" and not theirs.bnb_4bit_use_double_quant
    origin = json.loads((out / "localmoe_draft.json").read_text())
    assert (origin["method"], origin["bits"], origin["group_size"]) == ("nf4", 4, 64)
    assert origin["settings"] == {"dtype": "bfloat16"}


def test_without_bitsandbytes_a_draft_is_read_but_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    model = source(num_layers=1)
    out = write(tmp_path / "draft", model)
    found = DraftCheckpoint.open(out).matrix(NAMING, 1, 2, "down", (128, 64))
    expected = nearest(model.matrices(0, 2)[2])
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.scales, expected.scales)
    with (
        pytest.raises(
            DraftError, match=r"bitsandbytes, which is not installed: .* -m pip install"
        ) as refusal,
        DraftWriter(tmp_path / "other", CONFIG, NAMING, provenance(), 1000) as writer,
    ):
        build_nf4_draft(model, writer)
    assert str(refusal.value).endswith(".") and names_in(tmp_path) == {"draft"}


def test_a_build_stops_when_asked_to(functional: Any, tmp_path: Path) -> None:
    cancel = threading.Event()
    with (
        pytest.raises(DraftCancelledError, match="after 2 of 6 experts"),
        DraftWriter(tmp_path / "draft", CONFIG, NAMING, provenance(), 1000) as writer,
    ):
        build_nf4_draft(source(), writer, progress=lambda p: p.done == 2 and cancel.set(), cancel=cancel)
    assert names_in(tmp_path) == set()


def test_what_nf4_cannot_hold_is_refused(functional: Any) -> None:
    with pytest.raises(
        DraftError, match="128 x 96 matrix does not fit NF4, whose blocks are 64 input features"
    ):
        estimate_layout_bytes(source(intermediate=96), Nf4Layout())
    for bad, word in ((float("nan"), "NaN"), (float("-inf"), "infinite")):
        weight = torch.randn(4, 64)
        weight[2, 3] = bad
        with pytest.raises(ValueError, match=word):
            quantize_nf4(weight)


def text(tensor: Tensor, **changes: Any) -> Tensor:
    values = {**json.loads(bytes(tensor.tolist())), **changes}
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


STATE = "weight.quant_state.bitsandbytes__nf4"
DAMAGES: list[tuple[str, Callable[[Tensor], Tensor | None], str]] = [
    ("weight.quant_map", lambda t: t * 2, "table of values is not NF4's"),
    ("weight.absmax", lambda t: t * torch.inf, "a scale is not finite"),
    ("weight.absmax", lambda t: t.half(), "F16 .* should be F32"),
    ("weight.absmax", lambda t: None, "has no tensor .*absmax"),
    ("weight", lambda t: t[:-1].clone(), r"U8 \[4095, 1\] and should be U8 \[4096, 1\]"),
    (STATE, lambda t: text(t, blocksize=128), "nf4 in blocks of 128 of shape .* nf4 in blocks of 64"),
    (STATE, lambda t: text(t, quant_type="fp4"), "fp4 in blocks"),
    (STATE, lambda t: text(t, shape=[128, 64]), r"shape \[128, 64\] and should be .* \[64, 128\]"),
    (STATE, lambda t: t[:5].clone(), "description .* cannot be read"),
    (STATE, lambda t: t[:0].clone(), "does not fit the model"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "change", "reason"), DAMAGES)
def test_a_damaged_matrix_is_refused_in_one_sentence(
    part: str, change: Callable[[Tensor], Tensor | None], reason: str, tmp_path: Path
) -> None:
    file = write(tmp_path / "draft", source(num_layers=1, num_experts=1)) / "model.safetensors"
    tensors = load_file(file)
    changed = change(tensors.pop(f"{MODULE}.{part}"))
    save_file(tensors | ({} if changed is None else {f"{MODULE}.{part}": changed}), file)
    with pytest.raises(DraftError, match=reason) as refusal:
        DraftCheckpoint.open(tmp_path / "draft").matrix(NAMING, 1, 0, "up", UP_SHAPE)
    assert "\n" not in str(refusal.value) and "'localmoe draft MODEL'." in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"bnb_4bit_quant_type": "fp4"}, "fp4"), ({"load_in_4bit": False}, "8 bits"),
        ({"bnb_4bit_use_double_quant": True}, "doubly quantised NF4"),
    ],
)  # fmt: skip
def test_other_formats_of_bitsandbytes_are_refused(change: dict[str, Any], kind: str, tmp_path: Path) -> None:
    config = write(tmp_path / "draft", source(num_layers=1, num_experts=1)) / "config.json"
    values = json.loads(config.read_text())
    values["quantization_config"] |= change
    config.write_text(json.dumps(values))
    with pytest.raises(DraftError, match=f"bitsandbytes' {kind}, and this version reads NF4"):
        DraftCheckpoint.open(tmp_path / "draft")
