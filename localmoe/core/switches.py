"""Optimisations that a request can take or leave, so that what each is worth can be measured. Switches
nothing itself, and answers are the same with any of them on or off."""

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
        whole_window: the draft runs its last token too, for its routing alone, so that the routing of every
            token of the verify pass is foretold; off: that of all but the last.
        look_up: where the draft length is left to the engine, what was looked up in the text takes the place
            of a draft that would be slower, or that there is not; off: as if it were not looked up.
    """

    copies_beside: bool = True
    layer_batches: bool = False
    fused_draft: bool = True
    whole_window: bool = False
    look_up: bool = True

    def __str__(self) -> str:
        """For people: what differs from the defaults; "" if nothing does."""
        parts = (
            "" if self.copies_beside else "no copies beside computing",
            "a layer's copies in one" if self.layer_batches else "",
            "" if self.fused_draft else "no fused draft kernel",
            "whole window routed" if self.whole_window else "",
            "" if self.look_up else "nothing looked up",
        )
        return ", ".join(part for part in parts if part)


DEFAULT_SWITCHES = Switches()
