"""What a tokenizer of damaged files may raise, as one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localmoe.core.errors import CheckpointError, sentence_of


@contextmanager
def reading_tokenizer(folder: Path) -> Iterator[None]:
    """
    Raises:
        CheckpointError: whatever was raised within. The library raises plain Exception, and where it panics
            what is no Exception at all.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise CheckpointError(f"The tokenizer in {folder} cannot be read: {sentence_of(error)}") from error
