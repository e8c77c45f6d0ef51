"""Optimisations that a request can do without, so that what each is worth can be measured. Switches nothing
itself, and answers are the same with all of them on or off."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Switches:
    """What is on.

    Attributes:
        copies_beside: prefetched experts are copied while the model computes; off: whoever asks for them
            waits until they are here (MoE-SpeQ's "without async prefetch", SP-MoE's "vanilla prefetch").
        layer_batches: prefetches of one layer are copied as one operation; off: one after the other. Where
            whole passes run on a GPU, all that wait are issued at once in any case.
        fused_draft: draft experts are multiplied by kernels that read their codes; off: each expert is
            turned into numbers and multiplied by torch's own operators.
    """

    copies_beside: bool = True
    layer_batches: bool = False
    fused_draft: bool = True

    def __str__(self) -> str:
        """For people: what differs from the defaults; "" if nothing does."""
        parts = (
            "" if self.copies_beside else "no copies beside computing",
            "a layer's copies in one" if self.layer_batches else "",
            "" if self.fused_draft else "no fused draft kernel",
        )
        return ", ".join(part for part in parts if part)


DEFAULT_SWITCHES = Switches()
