"""Choose a token from each row of logits without the host, as `kernels.choices` says. The vocabulary is never
sorted: who is the largest of score + noise is known at once, and whether it is among the k best, or in the
nucleus, follows from the number or the mass of those that score better. If it is not, whatever scores no
better is out too, and the next one is looked for among the rest; with top-p 0.95 that happens to one token
in twenty. A small k is cut off first, from a shortlist: the k best tokens score no worse than the best ones
of the k best chunks. On the way it is seen how far the choice was ahead of the next one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localmoe.kernels.choices import NO_CHOICE, ChoiceView
from localmoe.kernels.gpu.launch import launch
from localmoe.kernels.gpu.sizes import cdiv, next_power_of_2

_CHUNK = 1024  # tokens of one program that looks for the first candidate
_SHORT = 512  # places of a shortlist
_BLOCK = 8192  # tokens that the program of a row looks at together


def choose_tokens(logits: Tensor, positions: Tensor, view: ChoiceView) -> tuple[Tensor, Tensor]:
    """The token after each row of logits (R, V), contiguous, which stands at `positions`, int64 (R,): int64
    (R,); and its margin, float32 (R,): what the largest of score + noise is ahead of the second. A token that
    was found only after another had been cut off by top-p or min-p has margin 0. A row's choice depends on no
    other row."""
    rows, vocab = logits.shape
    assert logits.is_contiguous() and positions.is_contiguous()
    assert view.seen.shape == (vocab,), f"{tuple(view.seen.shape)} for {vocab} tokens"
    chunks = cdiv(vocab, _CHUNK)
    found = torch.empty(rows, 4, chunks, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    short = torch.empty(rows, 2, _SHORT, dtype=torch.float32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    margins = torch.empty(rows, dtype=torch.float32, device=logits.device)
    words, numbers = view.words, view.words.view(torch.float64)
    shared = (logits, view.seen, positions, words, numbers, found, places)
    launch(_best_of_chunk, (rows, chunks), *shared, vocab, CHUNK=_CHUNK, num_warps=4, enable_fp_fusion=False)
    block = min(_BLOCK, next_power_of_2(vocab))
    launch(
        _choose, (rows,),
        *shared, short, out, margins, vocab, chunks, C_PAD=next_power_of_2(chunks), BLOCK=block,
        SHORT=_SHORT, NOTHING=NO_CHOICE, num_warps=max(4, min(32, block // 512)), enable_fp_fusion=False,
    )  # fmt: skip
    return out, margins


@triton.jit
def _scores(logits, seen, position, penalty, temperature, at, vocab):
    """float32 of the tokens `at`, -inf beyond the vocabulary."""
    scores = tl.load(logits + at, mask=at < vocab, other=-float("inf")).to(tl.float32)
    if penalty != 1.0:
        written = tl.load(seen + at, mask=at < vocab, other=0) <= position
        changed = tl.where(scores < 0, scores * penalty, tl.div_rn(scores, penalty + tl.zeros_like(scores)))
        scores = tl.where(written, changed, scores)
    if temperature > 0:
        scores = tl.div_rn(scores, temperature + tl.zeros_like(scores))
    return scores


@triton.jit
def _perturbed(scores, seed, position, temperature, at):
    """Scores plus the noise that belongs to seed, position and token."""
    if temperature > 0:
        zeros = tl.zeros_like(at).to(tl.uint32)
        word, _, _, _ = tl.philox(seed, at.to(tl.uint32), zeros + position.to(tl.uint32), zeros, zeros)
        uniform = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23; neither 0 nor 1
        scores = scores - tl.log(-tl.log(uniform))
    return scores


@triton.jit
def _finite(score):
    """The score, or 0 where it is infinite: that is nothing to subtract."""
    return tl.where(tl.abs(score) == float("inf"), 0.0, score)


@triton.jit
def _ahead(key, second):
    """How far a score is ahead of the second: very far, where there is none."""
    return tl.where(second == -float("inf"), 1e30, key - _finite(second))


@triton.jit
def _best_of_chunk(logits, seen, positions, words, numbers, found, places, vocab, CHUNK: tl.constexpr):
    """The best perturbed token of a chunk, the chunk's best score, its sum of exponentials, and the second
    best perturbed score."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    position, seed = tl.load(positions + row), tl.load(words)
    temperature, penalty = tl.load(numbers + 2).to(tl.float32), tl.load(numbers + 5).to(tl.float32)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = _scores(logits + row.to(tl.int64) * vocab, seen, position, penalty, temperature, at, vocab)
    keys = tl.where(at < vocab, _perturbed(scores, seed, position, temperature, at), -float("inf"))
    key, top = tl.max(keys, 0), tl.max(scores, 0)
    # where nothing is possible, nothing is added; a score that is no number, or infinite, spoils the sum
    mass = tl.sum(tl.exp(scores - _finite(top)), 0)
    out = found + row * 4 * tl.num_programs(1) + chunk
    tl.store(out, key)
    tl.store(out + tl.num_programs(1), top)
    tl.store(out + 2 * tl.num_programs(1), mass)
    place = tl.min(tl.where(keys == key, at, vocab), 0)
    tl.store(places + row * tl.num_programs(1) + chunk, place)
    tl.store(out + 3 * tl.num_programs(1), tl.max(tl.where(at == place, -float("inf"), keys), 0))


@triton.jit
def _above(logits, seen, position, penalty, temperature, limit, top, vocab, BLOCK: tl.constexpr):
    """(number of tokens that score above `limit`, sum of their exponentials)."""
    count, mass = 0, 0.0
    for start in range(0, vocab, BLOCK):
        scores = _scores(
            logits, seen, position, penalty, temperature, start + tl.arange(0, BLOCK), vocab
        )  # fmt: skip
        above = scores > limit
        count += tl.sum(above.to(tl.int32), 0)
        mass += tl.sum(tl.where(above, tl.exp(scores - top), 0.0), 0)
    return count, mass


@triton.jit
def _edge_of(logits, seen, position, penalty, temperature, k, top, vocab, BLOCK: tl.constexpr):
    """A score that the k best tokens, and those equal to the last of them, are above, and no others."""
    width = 1.0
    low = top - width
    count, _ = _above(logits, seen, position, penalty, temperature, low, top, vocab, BLOCK)
    while (count < k) & (width < 1e8):
        width *= 4.0
        low = top - width
        count, _ = _above(logits, seen, position, penalty, temperature, low, top, vocab, BLOCK)
    high = top + 0.0
    within = (count > k) & (low < high)
    while within:  # more than k are above `low`, fewer than k above `high`
        middle = low + (high - low) * 0.5
        within = (middle > low) & (middle < high)
        if within:
            count, _ = _above(logits, seen, position, penalty, temperature, middle, top, vocab, BLOCK)
            if count >= k:
                low = middle
            else:
                high = middle
            within = count != k
    if width >= 1e8:
        if count < k:
            low = -float("inf")
    return low


@triton.jit
def _best_above(
    logits, seen, position, seed, penalty, temperature, edge, floor, vocab, BLOCK: tl.constexpr
):  # fmt: skip
    """(score, token) of the best perturbed one that scores above `edge` and not below `floor`."""
    key, value, place = -float("inf"), -float("inf"), 0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        scores = _scores(logits, seen, position, penalty, temperature, at, vocab)
        keys = _perturbed(scores, seed, position, temperature, at)
        keys = tl.where((scores > edge) & (scores >= floor), keys, -float("inf"))
        best = tl.max(keys, 0)
        if best > key:
            key = best
            place = tl.min(tl.where(keys == best, at, vocab), 0)
            value = tl.max(tl.where(at == place, scores, -float("inf")), 0)
    return value, place


@triton.jit
def _kth(scores, k, top):
    """The k-th largest of scores, of which at least k are finite, and a number that it and its betters are
    above, and no others."""
    least = tl.min(tl.where(scores == -float("inf"), top, scores), 0)
    low = least - tl.maximum(1.0, tl.abs(least) * 1e-3)
    high = top + 0.0
    within = low < high
    while within:  # at least k are above `low`, fewer than k above `high`
        middle = low + (high - low) * 0.5
        within = (middle > low) & (middle < high)
        if within:
            if tl.sum((scores > middle).to(tl.int32), 0) >= k:
                low = middle
            else:
                high = middle
    return high, low


@triton.jit
def _shortlist(
    logits, seen, position, penalty, temperature, bound, short, vocab, BLOCK: tl.constexpr,
    SHORT: tl.constexpr,
):  # fmt: skip
    """Write scores and tokens that score at least `bound` to `short`, float32 (2, SHORT), as far as there is
    room; how many there are."""
    count = 0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        scores = _scores(logits, seen, position, penalty, temperature, at, vocab)
        listed = (scores >= bound) & (scores > -float("inf"))
        place = count + tl.cumsum(listed.to(tl.int32), 0) - 1
        tl.store(short + place, scores, mask=listed & (place < SHORT))
        tl.store(short + SHORT + place, at.to(tl.float32, bitcast=True), mask=listed & (place < SHORT))
        count += tl.sum(listed.to(tl.int32), 0)
    return count


@triton.jit
def _best_of_short(short, count, seed, position, temperature, k, top_p, floor, top, SHORT: tl.constexpr):
    """(token that is chosen from a shortlist that holds the k best, its margin over the others)."""
    at = tl.arange(0, SHORT)
    scores = tl.load(short + at, mask=at < count, other=-float("inf"))
    tokens = tl.load(short + SHORT + at, mask=at < count, other=0.0).to(tl.int32, bitcast=True)
    keys = _perturbed(scores, seed, position, temperature, tokens)
    _, edge = _kth(scores, k, top)
    masses = tl.exp(scores - top)
    limit = top_p * tl.sum(tl.where(scores > edge, masses, 0.0), 0)
    place, pending, margin = 0, 1, 0.0
    while pending == 1:
        left = tl.where((scores > edge) & (scores >= floor), keys, -float("inf"))
        key = tl.max(left, 0)
        place = tl.min(tl.where(left == key, at, SHORT), 0)
        margin = _ahead(key, tl.max(tl.where(at == place, -float("inf"), left), 0))
        value = tl.sum(tl.where(at == place, scores, 0.0), 0)
        if (top_p >= 1) | (tl.sum(tl.where(scores > value, masses, 0.0), 0) < limit):
            pending = 0
        else:
            edge = value
    return tl.sum(tl.where(at == place, tokens, 0), 0), margin


@triton.jit
def _choose(
    logits, seen, positions, words, numbers, found, places, short, out, margins, vocab, chunks,
    C_PAD: tl.constexpr, BLOCK: tl.constexpr, SHORT: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    position, seed, k = tl.load(positions + row), tl.load(words), tl.load(words + 1)
    temperature, top_p = tl.load(numbers + 2).to(tl.float32), tl.load(numbers + 3).to(tl.float32)
    min_p, penalty = tl.load(numbers + 4).to(tl.float32), tl.load(numbers + 5).to(tl.float32)
    logits += row.to(tl.int64) * vocab
    chunk = tl.arange(0, C_PAD)
    parts = found + row * 4 * chunks + chunk
    keys = tl.load(parts, mask=chunk < chunks, other=-float("inf"))
    tops = tl.load(parts + chunks, mask=chunk < chunks, other=-float("inf"))
    masses = tl.load(parts + 2 * chunks, mask=chunk < chunks, other=0.0)
    seconds = tl.load(parts + 3 * chunks, mask=chunk < chunks, other=-float("inf"))
    top = tl.max(tops, 0)
    whole = tl.sum(masses * tl.exp(tops - _finite(top)), 0)
    in_chunk = tl.load(places + row * chunks + chunk, mask=chunk < chunks, other=vocab)
    key = tl.max(keys, 0)
    place = tl.min(tl.where(keys == key, in_chunk, vocab), 0)
    margin = _ahead(key, tl.max(tl.where(in_chunk == place, seconds, keys), 0))
    sound = (whole > 0) & (whole < float("inf"))
    floor = -float("inf")
    if min_p > 0:
        floor = top + tl.log(min_p)
    short += row * 2 * SHORT
    listed = vocab + SHORT  # tokens that a shortlist has to hold
    if sound & (temperature > 0) & (k > 0) & (k <= tl.sum((tops > -float("inf")).to(tl.int32), 0)):
        bound, _ = _kth(tops, k, top)
        listed = _shortlist(logits, seen, position, penalty, temperature, bound, short, vocab, BLOCK, SHORT)
    if listed <= SHORT:
        tl.debug_barrier()  # other threads wrote it
        place, margin = _best_of_short(
            short, listed, seed, position, temperature, k, top_p, floor, top, SHORT
        )  # fmt: skip
    elif sound & (temperature > 0):
        value = tl.max(
            _scores(logits, seen, position, penalty, temperature, place + tl.arange(0, 1), vocab), 0
        )  # fmt: skip
        edge = -float("inf")
        if (k > 0) & (k < vocab):
            edge = _edge_of(logits, seen, position, penalty, temperature, k, top, vocab, BLOCK)
            _, whole = _above(logits, seen, position, penalty, temperature, edge, top, vocab, BLOCK)
        pending = 1
        while pending == 1:
            if (value > edge) & (value >= floor):
                better = 0.0
                if top_p < 1:
                    _, better = _above(logits, seen, position, penalty, temperature, value, top, vocab, BLOCK)
                if (top_p >= 1) | (better < top_p * whole):
                    pending = 0
                else:
                    edge = value
            if pending == 1:
                margin = 0.0
                value, place = _best_above(
                    logits, seen, position, seed, penalty, temperature, edge, floor, vocab, BLOCK
                )  # fmt: skip
    tl.store(out + row, tl.where(sound, place, NOTHING).to(tl.int64))
    tl.store(margins + row, margin)
