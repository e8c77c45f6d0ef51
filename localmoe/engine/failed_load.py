"""Give a device's memory back after a load that failed, though somebody still holds the error: its traceback
refers to all that the load had made. Decides nothing."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from localmoe.model.skeleton import Skeleton
from localmoe.model.uninstall import uninstall


@contextmanager
def giving_back(skeletons: Sequence[Skeleton], device: torch.device) -> Iterator[None]:
    """After an error inside, forget what the functions had in hand that it came through, and those behind it;
    the skeletons give up their weights."""
    try:
        yield
    except BaseException as error:
        for skeleton in skeletons:
            uninstall(skeleton.model)
            skeleton.model.to("meta")
        _forget(error)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        raise


def _forget(error: BaseException) -> None:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        found = waiting.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)  # those that still run keep theirs
            waiting += [found.__cause__, found.__context__]
