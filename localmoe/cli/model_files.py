"""Refuse a file in the place of a model: models are folders. Reads no file."""

from __future__ import annotations

import os

from localmoe.core.errors import UnsupportedModelError
from localmoe.hub.safetensors_header import shown


def check_no_file(model: str | None) -> None:
    """Pass whatever may be a model.

    Raises:
        UnsupportedModelError: it is a file.
    """
    if model is None or not os.path.isfile(os.path.expanduser(model)):
        return
    if model.lower().endswith(".gguf"):
        raise UnsupportedModelError(
            f"{shown(model)} is a GGUF file: localmoe reads safetensors alone, because they can be checked "
            "and read in pieces and run no code; get the safetensors version of the model."
        )
    raise UnsupportedModelError(
        f"{shown(model)} is a file: give the folder of the model, with its config.json."
    )
