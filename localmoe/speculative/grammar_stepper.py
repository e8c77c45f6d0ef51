"""Steps whose tokens a grammar has to allow, of a stepper that knows none: the first one that is not allowed
is chosen anew, by one more pass, and with it what the grammar leaves no choice about there.

The distribution is that of the allowed tokens: with p(allowed) = a, such a token comes at once with p(x), and
after a refusal with (1 - a) p(x)/a, together p(x)/a. Greedily it is the largest of them. (With top-k, top-p
or min-p the first choice is cut before it is refused, and only the second is allowed before it is cut.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from localmoe.core.gates import Gate
from localmoe.model.runner import PassRunner
from localmoe.speculative.forced_tokens import ForcedTokens
from localmoe.speculative.grammar import Grammar
from localmoe.speculative.sampling import TokenSampler
from localmoe.speculative.steppers import PassStepper, StepOutcome, Stepper


class GrammarStepper:
    """The steps of one answer."""

    def __init__(
        self,
        make: Callable[[], Stepper],
        runner: PassRunner,
        sampler: TokenSampler,
        grammar: Grammar,
    ) -> None:
        """make: what takes the steps, from any text on; made anew after each token that was not allowed, for
        it takes that one for granted. sampler: of that grammar."""
        self._make, self._stepper = make, make()
        self._runner, self._grammar = runner, grammar
        self._anew = PassStepper(runner, ForcedTokens(grammar), sampler, None)
        self._history: Sequence[int] = ()
        self._room = 0

    @property
    def hears_margins(self) -> bool:
        """As the stepper does."""
        return self._stepper.hears_margins

    def begin(self, history: Sequence[int], length: int, *, room: int, gate: Gate | None = None) -> None:
        """As the stepper does."""
        self._history, self._room = history, room
        self._stepper.begin(history, length, room=room, gate=gate)

    def finish(self) -> StepOutcome:
        """What the stepper emits, as far as it is allowed, and then other tokens."""
        done = self._stepper.finish()
        try:
            return self._allowed(done)
        except BaseException:
            self._stepper.close()
            self._runner.rewind(len(self._history) - 1)  # nobody hears of what was emitted
            raise

    def _allowed(self, done: StepOutcome) -> StepOutcome:
        """The same step, up to the first token that is not allowed, and in its place one that is, or what is
        forced there and one after it."""
        tokens = done.tokens
        allowed = self._grammar.valid(self._history, tokens)
        if allowed == len(tokens):
            return done
        self._stepper.close()  # what it has begun is about a text that will not be
        text = [*self._history, *tokens[:allowed]]
        self._go_back(text)
        room = self._room - allowed
        most = min(room, self._runner.passes.rows.max_rows) - 1
        self._anew.begin(text, len(self._grammar.forced(text)[:most]), room=room)
        chosen = self._anew.finish()
        self._stepper = self._make()
        verify_s = done.verify_s + chosen.verify_s
        *besides, token = chosen.tokens
        return replace(done, accepted=allowed, besides=besides, token=token, verify_s=verify_s)

    def close(self) -> None:
        """As the stepper does."""
        self._stepper.close()

    def _go_back(self, text: Sequence[int]) -> None:
        """The state holds all of the text but its last token."""
        sequence, length = self._runner.sequence, len(text) - 1
        kept = min(length, sequence.keepable(length))
        sequence.truncate(kept)
        while kept < length:
            chunk = text[kept : kept + self._runner.prefill_rows(length - kept)]
            self._runner.run(chunk, "prefill", last_only=True)
            kept += len(chunk)
