"""When the rest of an expert is copied that the CPU computed a part of: from the end of its layer's experts
on, beside all that comes next, until the pass ends. So a slot is complete before another pass may read it.
Which experts are completed is decided within the pass (kernels.gpu.grouping).
"""

from __future__ import annotations

import torch

from localmoe.kernels.gpu.copy_rest import copy_rest
from localmoe.kernels.rests import RestView
from localmoe.model.side_stream import SideStream


class RestCopies:
    """Of one model's passes. They have a stream of their own: what is foretold must not wait for them."""

    def __init__(self, device: torch.device) -> None:
        self._side = SideStream(device)

    def copy(self, rest: RestView) -> None:
        """A layer has read all that it needs, and its job is known."""
        with self._side:
            copy_rest(rest)

    def join(self) -> None:
        """What is issued from here on starts after all copies."""
        self._side.join()
