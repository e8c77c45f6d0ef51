"""The part of a model that reads and writes text: the class that transformers has for it, and the model
without what sees and hears. Reads no weights.
"""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn
from transformers.generation import GenerationMixin

_CLASSES = (
    transformers.AutoModelForCausalLM,  # first: it gives some models without their other parts
    transformers.AutoModelForImageTextToText,
    transformers.AutoModelForMultimodalLM,
)


def language_model_class(config: Any) -> Any:
    """Which of transformers' automatic classes makes a language model of a config; AutoModelForCausalLM,
    whose own words say so, if none does."""
    return next((kind for kind in _CLASSES if type(config) in kind._model_mapping), _CLASSES[0])


def writes_tokens(model: Any) -> bool:
    """Whether a model writes one token after another: some fill in whole blocks, or are several models."""
    return isinstance(model, GenerationMixin) and type(model).forward is not nn.Module.forward


def keep_text_part(model: Any) -> None:
    """Take away, with their weights, the modules that text does not pass through: encoders of pictures, sound
    and video, and what leads from them to the decoder. Does nothing to a model for text alone."""
    if model.config.get_text_config() is model.config:
        return
    needed = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    if any(module is model or not isinstance(module, nn.Module) for module in needed):
        return  # it does not say where its parts are
    _keep(model, {id(module) for module in needed})


def without_text_part(model: Any) -> None:
    """The other way round: take away what text passes through, and keep the encoders and what leads from
    them.

    Raises AttributeError, NotImplementedError: it does not say where its parts are."""
    _drop(model, {id(model.get_decoder()), id(model.get_input_embeddings())})


def _drop(parent: nn.Module, dropped: set[int]) -> None:
    for name, child in parent.named_children():
        if id(child) in dropped:
            setattr(parent, name, None)
        else:
            _drop(child, dropped)


def _keep(parent: nn.Module, needed: set[int]) -> None:
    for name, child in parent.named_children():
        if id(child) in needed:
            continue
        if any(id(module) in needed for module in child.modules()):
            _keep(child, needed)
        elif next(child.parameters(), None) is not None:
            setattr(parent, name, None)
