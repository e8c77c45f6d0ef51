"""What kernels see of an expert's rest: the inner columns that the CPU computed, so that the link did not
read them, and without which what lies in its slot is no whole expert. No Triton, no decisions.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

WORD_BYTES = 4
LOAD_WORDS = 4  # of one load: numbers of words are multiples of this
PLANNED, COPIED = range(2)  # places in `words`
REST_WORDS = 2
COLUMNS = 2  # place in `job`
JOB_WORDS = 3
PIECE_NUMBERS = 6


@dataclass(frozen=True, slots=True)
class RestPiece:
    """A matrix of words (four bytes of a record) that belongs to the inner columns from 0 on.

    Attributes:
        first: words before it in a record. pitch: from one of its rows to the next.
        rows: it has; 0: one for each `group` of columns, or begun group.
        group, width: its rows have `width` words for each `group` of columns, or, where the rows are as many
            as there are groups, `width` words each.
        counted: whether its words are among those that RestView counts: there are no begun groups.
    """

    first: int
    pitch: int
    rows: int
    group: int
    width: int
    counted: bool = True

    @property
    def numbers(self) -> tuple[int, ...]:
        """As the device has it: words by loads."""
        words = [number // LOAD_WORDS for number in (self.first, self.pitch, self.width)]
        return *words, self.rows, self.group, int(self.counted)

    @property
    def fits(self) -> bool:
        """Whether it can be read by whole loads."""
        return all(number % LOAD_WORDS == 0 for number in (self.first, self.pitch, self.width))

    def num_words(self, columns: int) -> int:
        """Of so many columns."""
        return max(self.rows, 1) * self.width * -(-columns // self.group)


@dataclass(frozen=True, slots=True)
class RestView:
    """The rests of one layer.

    Attributes:
        pieces: int64 (P, PIECE_NUMBERS), RestPiece.numbers of each.
        quantum_words: that are counted for as many columns as these come in multiples of.
        record_words: of a whole expert.
        words: int64 (REST_WORDS,), of all layers, since the load: counted words of rests up to those that are
            planned, and how many are copied.
        job: int64 (JOB_WORDS,): addresses of the host's record and of the slot; columns to copy, 0 for none.
        anchor: int32, anything, aligned.
    """

    pieces: Tensor
    quantum_words: int
    record_words: int
    words: Tensor
    job: Tensor
    anchor: Tensor
