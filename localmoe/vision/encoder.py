"""A model's vision encoder: transformers' own modules, with weights that stay in host RAM. Knows no file of a
picture and no prompt."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from localmoe.core.errors import CheckpointError, HardwareError, UnsupportedModelError, sentence_of
from localmoe.experts.host_memory import PinnedPieces, anonymous_memory
from localmoe.hub.checkpoint import Checkpoint, TensorHeader
from localmoe.model.building import one_at_a_time
from localmoe.model.materialise import rebuild_buffers
from localmoe.model.parallel_reader import read_pieces
from localmoe.model.pieces import AnyPiece, split_read
from localmoe.model.text_part import without_text_part
from localmoe.model.weight_reader import check_kind, wrong_shape
from localmoe.vision.image_reader import Patches

_LOG = logging.getLogger(__name__)
_HOST = torch.device("cpu")
_ALIGNED = 64  # bytes


class VisionEncoder:
    """Of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint, config: Any, dtype: torch.dtype) -> None:
        """Without weights, see `read`.

        Args:
            config: transformers', of the whole model.
            dtype: that it computes in.

        Raises:
            UnsupportedModelError: transformers cannot build it.
        """
        self._checkpoint = checkpoint
        try:
            with one_at_a_time(), torch.device("meta"):
                self._model: Any = transformers.AutoModel.from_config(
                    config, dtype=dtype, trust_remote_code=False
                )
            without_text_part(self._model)
        except Exception as error:  # a config may make any line of any architecture fail
            raise UnsupportedModelError(
                f"transformers cannot build what reads pictures in {checkpoint.folder}: {sentence_of(error)}"
            ) from error
        self._model.eval()
        self._pinned = PinnedPieces()

    def read(self, *, pin: bool = False) -> None:
        """Its weights, into RAM. pin: register them with the CUDA driver, so that they come to the GPU at the
        link's speed; where it refuses, they come slower.

        Raises:
            BudgetError: the system refuses the memory.
            CheckpointError: some are missing, have another shape or cannot be read.
        """
        memory = _read_weights(self._model, self._checkpoint)
        rebuild_buffers(self._model, _HOST)
        if pin:
            try:
                self._pinned.pin(0, memory)
            except HardwareError as error:
                _LOG.warning("the vision encoder's weights are not pinned: %s", error)

    def close(self) -> None:
        """Give the memory back. It cannot encode any more."""
        self._pinned.release()
        self._model.to("meta")

    @property
    def num_bytes(self) -> int:
        """Of host RAM, for the weights."""
        return sum(one.numel() * one.element_size() for one in self._model.parameters())

    @torch.inference_mode()
    def encode(self, patches: Patches, device: torch.device) -> Tensor:
        """A picture's tokens.

        Args:
            patches: of one picture, see ImageReader.patches.
            device: that computes; on a GPU weights are there only while they are multiplied with.

        Returns:
            (1 + D, tokens, H) in host RAM, in the encoder's dtype: what stands in the place of the tokens'
            embedding, and what is added behind each of the first D decoder layers (DeepStack: Meng et al.
            2024).

        Raises:
            torch.OutOfMemoryError: of a GPU.
            UnsupportedModelError: its code fails otherwise.
        """
        try:
            with streamed(self._model, device):
                given = {name: one.to(device) for name, one in patches.items()}
                made = self._model.get_image_features(**given, return_dict=True)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a config may make any line of any architecture fail
            raise UnsupportedModelError(
                f"transformers cannot run what reads pictures in {self._checkpoint.folder} "
                f"({sentence_of(error)}): ask without pictures."
            ) from error
        deep = getattr(made, "deepstack_features", None) or []
        parts = [made.pooler_output, *deep]
        return torch.stack([_joined(part).to(_HOST) for part in parts])


def _joined(part: Tensor | tuple[Tensor, ...]) -> Tensor:
    return part if isinstance(part, Tensor) else torch.cat(tuple(part))


def _read_weights(model: Any, checkpoint: Checkpoint) -> Tensor:
    """All of them, uint8 in one piece, of which the model's are views."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    wanted: dict[str, Tensor] = model.state_dict()
    found: dict[str, TensorHeader] = {}
    for header in checkpoint.tensors.values():
        key, _ = rename_source_key(header.name, renamings, converters, model.base_model_prefix, wanted)
        if key not in wanted:
            continue
        check_kind(header, wanted[key])
        if tuple(header.shape) != tuple(wanted[key].shape):
            raise wrong_shape(f"Tensor {header.name} in {header.file.name}", header.shape, wanted[key].shape)
        found[key] = header
    absent = wanted.keys() - found.keys()
    if absent:
        raise CheckpointError(
            f"{len(absent)} weights of what reads pictures are missing from {checkpoint.folder}, e.g. "
            f"{min(absent)}: download the model again."
        )
    sizes = {key: -(-wanted[key].nbytes // _ALIGNED) * _ALIGNED for key in found}
    memory = torch.frombuffer(anonymous_memory(sum(sizes.values())), dtype=torch.uint8)
    pieces: list[AnyPiece] = []
    first = 0
    for key, header in found.items():
        tensor = memory[first : first + wanted[key].nbytes].view(wanted[key].dtype).view(wanted[key].shape)
        first += sizes[key]
        path, _, leaf = key.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._buffers:
            module._buffers[leaf] = tensor
        else:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        pieces += split_read(header, tensor)
    read_pieces(pieces, lambda piece: None, None)
    return memory


@contextmanager
def streamed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within, each module that multiplies has its weights on the device while it computes, one after the
    other; what is looked up in, such as places, has them there throughout."""
    if device == _HOST:
        yield
        return
    handles, movers = [], []
    try:
        for module in model.modules():
            own = [*module._parameters.values(), *module._buffers.values()]
            if all(one is None for one in own):
                continue
            movers.append(_Mover(module, device))
            if isinstance(module, nn.Embedding) or next(module.children(), None) is not None:
                movers[-1].bring()
                continue
            handles += [
                module.register_forward_pre_hook(movers[-1].bring),
                module.register_forward_hook(movers[-1].take_back),
            ]
        yield
    finally:
        for handle in handles:
            handle.remove()
        for mover in movers:
            mover.take_back()  # also of a module in which the pass ended


class _Mover:
    """A module's weights, there and back."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self._held: _Held | None = None

    def bring(self, *hooked: object) -> None:
        self._held = _bring(self._module, self._device)

    def take_back(self, *hooked: object) -> None:
        if self._held is not None:
            _put_back(self._module, self._held)
        self._held = None


_Held = tuple[dict[str, "nn.Parameter | None"], dict[str, "Tensor | None"]]


def _bring(module: nn.Module, device: torch.device) -> _Held:
    """What it had. Where the device has no room for all of it, it has that still."""
    held = dict(module._parameters), dict(module._buffers)
    parameters = {
        name: nn.Parameter(one.to(device), requires_grad=False)
        for name, one in held[0].items()
        if one is not None
    }
    buffers = {name: one.to(device) for name, one in held[1].items() if one is not None}
    module._parameters.update(parameters)
    module._buffers.update(buffers)
    return held


def _put_back(module: nn.Module, held: _Held) -> None:
    module._parameters.update(held[0])
    module._buffers.update(held[1])
