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
THREADS = _LINE * 5 + 6  # that draw blocks of the job
TASKS_X = _LINE * 5 + 7  # blocks of its rows that are converted first; of those, so many are done:
CONVERTED = _LINE * 8
# whether jobs may use the matrix unit: as the host says, for the next job; and of the job at hand
MAY_USE_UNIT, USES_UNIT = _LINE * 7 + 1, _LINE * 5 + 8
ABSENT = _LINE * 9  # the last job of which some records were not in RAM (absent)
CONTROL_WORDS = _LINE * 10

# places of int64 words that describe a product of rows with one matrix, whose job has DENSE for a layer:
# addresses of words (N, K), of float32 (N,) or 0, of float32 (T, K) and (T, N), T being the mailbox's; N; K;
# whether the words are float32
DENSE = -1
DENSE_WEIGHT, DENSE_BIAS, DENSE_X, DENSE_OUT, DENSE_ROWS, DENSE_COLUMNS, DENSE_WIDE, DENSE_WORDS = range(8)

# the same of attention, whose job has ATTEND for a layer. Addresses of float32 queries, of keys and values
# (kv_heads, capacity, D) and (kv_heads, capacity, V), of bytes that say what a token may look at, of what
# comes out (T, heads, V), of partial results (kv_heads, blocks, rows, V) and their maxima and sums (kv_heads,
# blocks, rows), of int32 places of a KV head's queries, of int64 (kv_heads,) zeros, of float32 (heads,) sinks
# or 0; bytes from a head to the next of queries, keys, values and masks, and from a token's mask to the next
# one's; query heads a KV head, and in all; blocks; D; V. Rows are the tokens of each head that shares a KV
# head, head by head.
ATTEND = -2
(
    ATTEND_QUERY, ATTEND_KEYS, ATTEND_VALUES, ATTEND_MASK, ATTEND_OUT, ATTEND_PARTS, ATTEND_TOPS, ATTEND_SUMS,
    ATTEND_PLACES, ATTEND_TALLIES, ATTEND_SINKS, ATTEND_QUERY_HEAD, ATTEND_KEY_HEAD, ATTEND_VALUE_HEAD,
    ATTEND_MASK_HEAD, ATTEND_MASK_ROW, ATTEND_GROUP, ATTEND_HEADS, ATTEND_BLOCKS, ATTEND_DIM,
    ATTEND_VALUE_DIM, ATTEND_WORDS,
) = range(22)  # fmt: skip
ATTEND_POSITIONS = 128  # of the cache in a block
ATTEND_ROWS = 128  # most of a job

X_ROWS = 4  # rows of activations of a block; of fewer than two such blocks one thread converts all
GATE_UP_ROWS = 8  # inner columns of a block: small ones end together on all threads
DOWN_ROWS = 16
DENSE_BLOCK = 16  # rows of its matrix
# times as many columns where weights are transposed, since a block reads a piece of every row, and where they
# are in codes, for whole strips of tiles; DOWN_ROWS of BF12 and FP8 are one strip, and stay as they are
WIDER, WIDER_CODES = 8, 2
