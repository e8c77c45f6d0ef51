"""What whoever waits for an expert is told when it cannot come."""

from __future__ import annotations

from localmoe.core.errors import LocalMoeError, TransferError
from localmoe.core.types import ExpertKey


def failure_of(doing: str, key: ExpertKey, error: BaseException) -> LocalMoeError:
    """One sentence for a user: the error itself where it is one, else what was being done to the expert."""
    if isinstance(error, LocalMoeError):
        return error
    told = TransferError(f"{doing} expert {key.expert} of layer {key.layer} failed: {error}")
    told.__cause__ = error
    return told
