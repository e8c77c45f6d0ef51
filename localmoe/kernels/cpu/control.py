"""The words that the CPU lane's threads share, and the blocks that their work is cut into. Runs nothing."""

from __future__ import annotations

# places of int64 words in the control memory; those that several threads write have a cache line of their own
_LINE = 16
OWNER, TICKET, FINISHED, STOP, HOLD = (_LINE * i for i in range(5))
TASKS_A, TASKS_B, STARTED = (_LINE * 5 + i for i in range(3))  # of the job; written before its ticket
JOBS, BUSY_TICKS, DONE_BYTES, AHEAD_BYTES = (_LINE * 6 + i for i in range(4))  # totals, before a job's answer
# what threads fetched ahead last; in the job at hand: the block that its first one is, how many they are, and
# the columns that the job takes of that expert
FETCHED, AHEAD_FIRST, AHEAD_BLOCKS, AHEAD_COLUMNS = _LINE * 7, _LINE * 5 + 3, _LINE * 5 + 4, _LINE * 5 + 5
CONTROL_WORDS = _LINE * 8

# places of int64 words that describe a product of rows with one matrix, whose job has DENSE for a layer:
# addresses of words (N, K), of float32 (N,) or 0, of float32 (T, K) and (T, N); T is the mailbox's
DENSE = -1
DENSE_WEIGHT, DENSE_BIAS, DENSE_X, DENSE_OUT, DENSE_ROWS, DENSE_COLUMNS = range(6)

GATE_UP_ROWS = 8  # inner columns of a block: small ones end together on all threads
DOWN_ROWS = 16
DENSE_BLOCK = 16  # rows of its matrix
# times as many columns where weights are transposed, since a block reads a piece of every row, and where they
# are in MXFP4, for whole strips of tiles
WIDER, WIDER_CODES = 8, 2
