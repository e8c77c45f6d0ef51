"""Another, smaller language model that drafts for the target: a plain transformers model, held whole on the
device, with a KV cache of its own. Chooses no tokens, and does not know which experts the target will use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.utils import logging as transformers_logging

from localmoe.core.errors import CheckpointError, DraftError, UnsupportedModelError, sentence_of
from localmoe.core.shared_length import shared_length
from localmoe.hardware.needs import PREFILL_CHUNK, kv_positions
from localmoe.hub.checkpoint import Checkpoint
from localmoe.hub.float8_tensors import is_in_codes
from localmoe.model.building import one_at_a_time
from localmoe.model.cached_pass import cached_pass
from localmoe.model.kv_cache import KVCache
from localmoe.model.kv_trial import kv_elements_per_token
from localmoe.model.parallel_reader import read_pieces
from localmoe.model.pieces import Piece, split_read
from localmoe.model.skeleton import can_roll_back, model_from_config, read_model_config
from localmoe.model.text_part import keep_text_part, language_model_class
from localmoe.model.tying import settle_ties
from localmoe.model.weight_reader import stored_dtype
from localmoe.quant.mxfp4 import is_packed


@dataclass(frozen=True, slots=True)
class DraftModelShape:
    """What is known of a draft model before its weights are read.

    Attributes:
        num_params: all of them, tied ones once.
        buffer_bytes: what is no parameter, such as rotary frequencies, in its own dtype.
        kv_elements_per_token: what its cache holds a token, all layers.
    """

    name: str
    folder: Path
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_context: int
    num_params: int
    buffer_bytes: int
    kv_elements_per_token: int
    checkpoint: Checkpoint

    @classmethod
    def read(cls, name: str, folder: Path) -> DraftModelShape:
        """From config and headers.

        Raises:
            LocalMoeError: the folder holds no whole model that transformers can run, its weights are
                quantised, or it cannot drop its last tokens.
        """
        checkpoint = Checkpoint.open(folder)
        config = read_model_config(checkpoint)
        if is_packed(checkpoint.config):
            raise DraftError(
                f"{name} cannot draft: its experts are stored in MXFP4, of which no draft model is read. "
                "Choose another draft model."
            )
        text = config.get_text_config()
        model = model_from_config(config, torch.bfloat16, f"the draft model in {folder}")
        settle_ties(model, checkpoint)
        if not can_roll_back(text):
            raise DraftError(
                f"{name} cannot draft: {config.model_type} keeps more than keys and values, which "
                "cannot drop a rejected token. Choose another draft model."
            )
        return cls(
            name=name,
            folder=folder,
            num_layers=int(text.num_hidden_layers),
            hidden_size=int(text.hidden_size),
            vocab_size=int(text.vocab_size),
            max_context=int(getattr(text, "max_position_embeddings", 0) or 4096),
            num_params=sum(p.numel() for p in model.parameters()),
            buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
            kv_elements_per_token=kv_elements_per_token(model, can_rollback=True),
            checkpoint=checkpoint,
        )


def _source(shape: DraftModelShape, config: Any) -> tuple[Any, dict[str, Any]]:
    """A class of transformers, and of what it is to make the model: the folder, but for weights of eight
    or four bits, for which transformers wants another package, the 16-bit ones that they are."""
    if not is_in_codes(shape.checkpoint.config):
        return language_model_class(config), {"pretrained_model_name_or_path": shape.folder}
    del config.quantization_config
    kind = type(model_from_config(config, torch.bfloat16, f"the draft model in {shape.folder}"))
    weights, pieces = {}, list[Piece]()
    for name, header in shape.checkpoint.tensors.items():
        weights[name] = torch.empty(header.shape, dtype=stored_dtype(header))
        pieces += split_read(header, weights[name])
    read_pieces(pieces)
    return kind, {"pretrained_model_name_or_path": None, "config": config, "state_dict": weights}


class DraftModel:
    """The loaded model and the tokens that it has read. One text at a time; a text that shares a prefix with
    the last one reads only the rest."""

    def __init__(self, model: Any, shape: DraftModelShape, context: int) -> None:
        """context: most tokens of a text."""
        self.shape = shape
        self.model = model
        # transformers' attention takes one token without a mask, so it must be given no more than was written
        self._cache = KVCache.of_model(model.config.get_text_config(), kv_positions(context), block=1)
        self._read: list[int] = []

    @classmethod
    def load(
        cls, shape: DraftModelShape, device: torch.device, dtype: torch.dtype, context: int
    ) -> DraftModel:
        """Read the weights onto the device.

        Raises:
            CheckpointError: weights are missing, do not fit the config, or were replaced meanwhile.
        """
        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            config = transformers.AutoConfig.from_pretrained(shape.folder, trust_remote_code=False)
            source, given = _source(shape, config)
            with one_at_a_time():
                model, found = source.from_pretrained(
                    **given, dtype=dtype, use_safetensors=True, local_files_only=True,
                    trust_remote_code=False, output_loading_info=True,
                )  # fmt: skip
            keep_text_part(model)
        except Exception as error:  # any line of any architecture
            raise CheckpointError(
                f"The draft model in {shape.folder} cannot be loaded: {sentence_of(error)}"
            ) from error
        finally:
            if bars:
                transformers_logging.enable_progress_bar()
        shape.checkpoint.check_unchanged()  # transformers opened the files by their names
        kept = model.state_dict()
        number = sum(key in kept for key in found["missing_keys"]) + len(found["mismatched_keys"])
        if number:
            raise CheckpointError(
                f"{number} weights of the draft model in {shape.folder} are missing or of another shape: "
                "download it again."
            )
        return cls(model.eval().to(device), shape, context)

    @property
    def num_bytes(self) -> int:
        """Device bytes of weights and cache."""
        weights = {t.data_ptr(): t for t in (*self.model.parameters(), *self.model.buffers())}
        held = sum(int(t.numel()) * int(t.element_size()) for t in weights.values())
        return held + self._cache.num_bytes

    def expect(self, text: Sequence[int]) -> None:
        """Nothing: a text is read when its next token is asked for."""

    @torch.inference_mode()
    def read(self, text: Sequence[int]) -> None:
        """Read `text` but for its last token, so that `next_logits` is one short pass."""
        self._keep_prefix(text)
        for start in range(len(self._read), len(text) - 1, PREFILL_CHUNK):
            self._run(text[start : min(start + PREFILL_CHUNK, len(text) - 1)])

    @torch.inference_mode()
    def next_logits(self, text: Sequence[int]) -> Tensor:
        """float32 (1, V) of what follows `text`; the last pass has the last token alone."""
        self.read(text)
        return self._run(text[-1:]).float()

    def forget(self) -> None:
        """Start from nothing."""
        self._read = []
        self._cache.truncate(0)

    def release(self) -> None:
        """Give the memory back."""
        self._read = []
        self._cache.release()
        self.model.to("meta")

    def _keep_prefix(self, text: Sequence[int]) -> None:
        """Drop what was read and is not the beginning of `text`, whose last token is always read anew."""
        shared = shared_length(self._read, text[:-1])
        if shared < len(self._read):
            self._cache.truncate(shared)
            del self._read[shared:]

    def _run(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens; the logits (1, V) of the last one. What an interrupted pass wrote is dropped."""
        start = len(self._read)
        device = self.model.device
        try:
            logits = cached_pass(
                self.model,
                torch.tensor([list(tokens)], device=device),
                torch.arange(start, start + len(tokens), device=device)[None],
                self._cache,
                keep=1,
            )[0]
        except BaseException as error:
            self._cache.truncate(start)
            if isinstance(error, Exception) and not isinstance(error, torch.OutOfMemoryError):
                raise UnsupportedModelError(
                    f"The draft model {self.shape.name} cannot run: {sentence_of(error)}"
                ) from error
            raise
        self._read.extend(tokens)
        return logits
