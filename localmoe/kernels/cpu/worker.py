"""A thread of the CPU lane: waits for jobs in a mailbox and computes its share of them, outside Python's
lock. Chooses no experts.

A job's experts are cut into blocks of gate_up, then blocks of down, behind blocks of its rows where these
have to be converted; threads draw blocks from one counter. The counter carries the job's number, so a thread
that comes late finds nothing to draw; a block of gate_up waits for the rows, and one of down for its expert's
gate_up. The thread that ends the last block answers.

Between two jobs threads fetch ahead what the mailbox says is likely to come, each the blocks that it will
compute itself (fetch_ahead). These are claimed one by one, so that none waits for a thread that is held up.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

from localmoe.kernels.cpu.atoms import (
    CAN_NAP,
    add,
    compiled,
    load,
    nap,
    part,
    pause,
    store,
    swap_if,
    ticks,
)
from localmoe.kernels.cpu.attention import attend_task
from localmoe.kernels.cpu.blocks import convert_task, prepare
from localmoe.kernels.cpu.control import (
    AHEAD_BLOCKS,
    AHEAD_BYTES,
    AHEAD_COLUMNS,
    AHEAD_FIRST,
    ATTEND,
    BUSY_TICKS,
    DENSE,
    FINISHED,
    HOLD,
    JOBS,
    OWNER,
    STARTED,
    STOP,
    TASKS_A,
    TASKS_B,
    TASKS_X,
    TICKET,
)
from localmoe.kernels.cpu.fetch_ahead import claim, fetch_ahead
from localmoe.kernels.cpu.tasks import dense_task, down_task, gate_up_size, gate_up_task, weight_bytes
from localmoe.kernels.mailbox import HEAD_LAYER, HEAD_TOKENS

_LOG = logging.getLogger(__name__)
STOPPED, PARKED = 0, 1
_SEQUENCE_SHIFT = 24
_DRAWN = (1 << _SEQUENCE_SHIFT) - 1
_NAP_US = 30


@compiled
def _withdraw(ticket: int, job: int) -> None:
    """Let nobody draw until `job` is prepared: a thread of an earlier job that was held up between looking at
    the ticket and at how many blocks there are would take the new job's number of them for its own's."""
    while True:
        found = load(ticket)
        if swap_if(ticket, found, ((job - 1) << _SEQUENCE_SHIFT) | _DRAWN):
            return


@part
def _job(
    me: int, job: int, base: int, answered: int, head: Any, entries: Any, pairs: Any, words: Any, out: Any,
    shape: Any, numbers: Any, records: Any, sizes: Any, x: Any, inner: Any, rows: Any, starts: Any,
    ready: Any, claims: Any, scratch: Any, rooms: Any, columned: Any, rowed: Any, coded: Any, packed: Any,
    dense: Any, attention: Any, steps: Any, like: Any, control: Any,
) -> None:  # fmt: skip
    owner = load(base + 8 * OWNER)
    if owner < job and swap_if(base + 8 * OWNER, owner, job):
        _withdraw(base + 8 * TICKET, job)
        prepare(
            job, base, head, entries, pairs, words, shape, records, sizes, x, rows, starts, ready, claims,
            scratch.shape[0], columned, rowed, coded, packed, control,
        )  # fmt: skip
        store(base + 8 * TICKET, job << _SEQUENCE_SHIFT)
    begun = False
    while True:
        ticket = load(base + 8 * TICKET)
        if ticket >> _SEQUENCE_SHIFT < job:  # its owner still prepares it
            if load(base + 8 * STOP) != 0:
                return
            pause()
            continue
        if ticket >> _SEQUENCE_SHIFT > job:
            return
        if not begun:  # first what this thread has in its cache
            begun = True
            columns, size = 0, gate_up_size(columned, coded, packed)
            for block in range(me, control[AHEAD_BLOCKS], scratch.shape[0]):
                if claim(claims, block, job):
                    columns += min(size, control[AHEAD_COLUMNS] - block * size)
                    gate_up_task(
                        control[AHEAD_FIRST] + block, base, head, entries, pairs, words, shape, numbers,
                        records, sizes, x, inner, rows, starts, ready, scratch[me], columned, rowed, coded,
                        packed, rooms, me, job,
                    )  # fmt: skip
            if columns > 0:
                add(base + 8 * AHEAD_BYTES, weight_bytes(columns * shape[3] * x.shape[1], coded, packed))
            continue
        drawn = (ticket & _DRAWN) - control[TASKS_X]
        if drawn >= control[TASKS_A] + control[TASKS_B]:
            return
        if not swap_if(base + 8 * TICKET, ticket, ticket + 1):
            continue
        if drawn < 0:
            task = drawn + control[TASKS_X]
            convert_task(task, job, base, head, entries, words, x, ready, coded, packed)
            continue
        if drawn < control[TASKS_A]:
            # what was fetched ahead comes last: its threads are at it
            task = (drawn + control[AHEAD_FIRST] + control[AHEAD_BLOCKS]) % control[TASKS_A]
            block = task - control[AHEAD_FIRST]
            if 0 <= block < control[AHEAD_BLOCKS] and not claim(claims, block, job):
                continue
            gate_up_task(
                task, base, head, entries, pairs, words, shape, numbers, records, sizes, x, inner, rows,
                starts, ready, scratch[me], columned, rowed, coded, packed, rooms, me, job,
            )  # fmt: skip
        else:
            if head[HEAD_LAYER] == DENSE:
                dense_task(drawn, base, dense, like, attention, head[HEAD_TOKENS], steps, scratch[me])
            elif head[HEAD_LAYER] == ATTEND:
                attend_task(drawn, attention, head[HEAD_TOKENS], steps, scratch[me])
            else:
                down_task(
                    drawn - control[TASKS_A], base, head, entries, pairs, words, out, shape, records, sizes,
                    inner, starts, ready, scratch[me], columned, rowed, coded, packed, rooms, me, job,
                )  # fmt: skip
            if load(base + 8 * STOP) != 0:  # the block may not be computed
                return
            if add(base + 8 * FINISHED, 1) + 1 == control[TASKS_B]:
                if head[HEAD_LAYER] >= 0:
                    control[JOBS] += 1
                    control[BUSY_TICKS] += ticks() - control[STARTED]
                store(answered, job)


def _entry(sources: int, *, kept: bool) -> Any:
    """The entry to the compiled code, which numba keeps on disk for the next start if it is to be `kept`.
    numba looks for changes of one file only; a number that stands for all `sources` makes it look at
    theirs."""

    @njit(nogil=True, cache=kept)
    def run(
        me: int, spin_ticks: int, park_ticks: int, control: Any, posted: int, answered: int, foretold: int,
        head: Any, entries: Any, pairs: Any, words: Any, out: Any,
        shape: Any, numbers: Any, records: Any, sizes: Any, x: Any, inner: Any, rows: Any, starts: Any,
        ready: Any, claims: Any, scratch: Any, rooms: Any, columned: Any, rowed: Any, coded: Any,
        packed: Any, dense: Any, attention: Any, steps: Any, like: Any,
    ) -> int:  # fmt: skip
        """Work until told to stop, or until nothing was posted for `park_ticks` while the HOLD word was 0;
        where `park_ticks` is negative, at the job of number `spin_ticks` until it is answered, whether or not
        it was posted for other threads to see.

        Args:
            me: this thread's number.
            control: int64 (CONTROL_WORDS,). posted, answered, foretold: addresses of the mailbox's words.
            head, entries, pairs, words, out: the mailbox. `words` (T, H) also tells the kind of numbers that
                the model computes in, and that biases have.
            shape: int64: K, interleaved, activation kind, matrices before down: 2, or without a gate 1.
            numbers: float32: alpha, limit.
            records: int64 (3, L, E): addresses of an expert's gate_up, of its biases of gate_up and of down
                (0: none); a record's is 0 too while it is not in RAM (absent).
            sizes: int64 (L,): inner size I of each layer.
            x, inner: (T, H), (P, I), of products.activations_kind; x is `words` itself where these are of
                that kind, in order. rows: int32 (P,). starts: int64 (2, A + 1).
            ready: int64 (A + T,): blocks of gate_up of each expert that are done; the last job that computes
                with each row. claims: int64 (blocks,), see fetch_ahead.claim; as many as all threads fetch.
            scratch: float32 (threads, 4, n). rooms: int64 (threads, gathered_rows.room_words)
                and (gathered_rows.shared_words,) where experts of several tokens may be computed by
                the processor's matrix unit; None: all are by its vectors.
            dense, steps, like: see tasks.dense_task. attention: see attention.attend_task; None where neither
                such a job comes nor a product with float32 weights.
            columned, rowed, coded, packed: a word of the weights' kind (see atoms.value) if they are 16-bit
                and transposed, 16-bit and not, in a coding with scales (codings, which says what words stand
                for MXFP4 and FP8), or in BF12; None for the others, whose code is not compiled.

        Returns:
            STOPPED or PARKED.
        """
        if sources < 0:
            return STOPPED
        base = control.ctypes.data
        last, told = load(answered), load(foretold)
        quiet = ticks()
        while load(base + 8 * STOP) == 0:
            job = spin_ticks if park_ticks < 0 else load(posted)
            if job > last:
                _job(
                    me, job, base, answered, head, entries, pairs, words, out, shape, numbers, records, sizes,
                    x, inner, rows, starts, ready, claims, scratch, rooms, columned, rowed, coded, packed,
                    dense, attention, steps, like, control,
                )  # fmt: skip
                last = job
                quiet = ticks()
                continue
            if park_ticks < 0:
                if load(answered) >= job:
                    return PARKED
                pause()
                continue
            if columned is None and load(foretold) != told:
                told = load(foretold)
                fetch_ahead(me, told, last, posted, shape, records, sizes, x, scratch, control, coded, packed)
                continue
            waited = ticks() - quiet
            if waited > park_ticks and load(base + 8 * HOLD) == 0:
                return PARKED
            if CAN_NAP and waited > spin_ticks and load(base + 8 * HOLD) == 0:
                nap(_NAP_US)
            else:
                for _ in range(8):
                    pause()
        return STOPPED

    return run


def _sources() -> int:
    """A number that changes with any file that the compiled code comes from."""
    folder = Path(__file__).parent
    names = ("mailbox.py", "mxfp4_tiles.py", "bf12_tiles.py", "fp8_tiles.py")
    above = [folder.parent / name for name in names]
    files = [*sorted(folder.glob("*.py")), *above]
    return zlib.crc32(b"".join(file.read_bytes() for file in files))


class CompiledEntry:
    """`run` of _entry for callers in Python. Where what numba kept of it cannot be read again (half a file,
    after a loss of power), or cannot be kept, it is compiled for this process alone."""

    def __init__(self, entry: Callable[..., Any] = _entry) -> None:
        """entry: see _entry."""
        self._make, self._sources = entry, _sources()
        try:
            self._entry = entry(self._sources, kept=True)
        except RuntimeError as error:  # no folder can be written to
            self._compile_anew(error)

    def __call__(self, *arguments: Any) -> int:
        """Work, as `run` does."""
        try:
            return int(self._entry(*arguments))
        except Exception as error:  # numba says what is wrong with its files in many ways
            if self._entry.overloads:
                raise  # it was read, so that is not it
            self._compile_anew(error)
        return int(self._entry(*arguments))

    def _compile_anew(self, error: Exception) -> None:
        _LOG.warning("What was compiled of the CPU lane cannot be kept or read again: %r", error)
        self._entry = self._make(self._sources, kept=False)


run = CompiledEntry()


@njit
def now() -> int:
    """The clock that `spin_ticks` and `park_ticks` are counted by."""
    count: int = ticks()
    return count
