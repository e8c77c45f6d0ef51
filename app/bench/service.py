"""What the Benchmark tab can ask for: run, predict, stop, past results. Knows no widget; every refusal is a
LocalMoeError of one sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from app.bench.job import BenchmarkJob, BenchmarkView
from app.bench.measuring import BenchmarkPlan, WhatIfPlan, run_benchmark, run_what_if
from app.bench.results import Result, ResultStore
from app.engine_status import EngineLike
from app.service import ChatService
from app.settings import parse_budget
from localmoe.core.config import DraftLength, parse_draft_length
from localmoe.core.errors import ConfigError
from localmoe.hardware.cards import find_card
from localmoe.prefetch.registry import check_policy

MAX_PROMPTS, MAX_TOKENS = 60, 1024


class BenchmarkService:
    """At most one job; the last one stays visible after its end."""

    def __init__(self, chats: ChatService) -> None:
        self.chats = chats
        self.results = ResultStore(chats.home / "benchmarks")
        self._job: BenchmarkJob | None = None

    def view(self) -> BenchmarkView | None:
        """The running job, or the last one."""
        job = self._job
        return None if job is None else job.view()

    def run(
        self, policies: Sequence[str], draft_lengths: Sequence[str], prompts: object, tokens: object
    ) -> None:
        """Measure every policy x draft length on the loaded model.

        Raises:
            LocalMoeError: a choice makes no sense, or the engine is not free.
        """
        plan = BenchmarkPlan(
            _policies(policies), _lengths(draft_lengths), _count("Prompts", prompts, 1, MAX_PROMPTS),
            _count("Tokens a prompt", tokens, 2, MAX_TOKENS),
        )  # fmt: skip
        if len(plan.draft_lengths) * len(plan.policies) < 1:
            raise ConfigError("Nothing is chosen.")
        self._start(lambda engine, job: run_benchmark(engine, plan, job))

    def what_if(
        self,
        cards: Sequence[str],
        policies: Sequence[str],
        draft_lengths: Sequence[str],
        prompts: object,
        tokens: object,
        budget: str,
    ) -> None:
        """Predict the loaded model on other cards.

        Raises:
            LocalMoeError: as `run`.
        """
        names = tuple(find_card(name).name for name in cards)
        if not names:
            raise ConfigError("No card is chosen: choose at least one.")
        fixed = tuple(length for length in _lengths(draft_lengths) if length != "auto")
        if not fixed:
            raise ConfigError("Predictions need a fixed draft length: choose 0 or a number beside auto.")
        plan = WhatIfPlan(
            names, _policies(policies), fixed, _count("Prompts", prompts, 1, MAX_PROMPTS),
            _count("Tokens a prompt", tokens, 2, MAX_TOKENS), parse_budget(budget),
            self.chats.load_settings.engine_config(self.chats.answers).context,
        )  # fmt: skip
        self._start(lambda engine, job: run_what_if(engine, plan, job))

    def stop(self) -> None:
        """End the job between two steps. Returns at once."""
        job = self._job
        if job is not None:
            job.stop.set()

    def _start(self, work: Callable[[EngineLike, BenchmarkJob], Result]) -> None:
        holder, runner = self.chats.holder, self.chats.runner

        def run(job: BenchmarkJob) -> str:
            with holder.without_improvement():
                runner.settle()
                try:
                    return self.results.add(work(engine, job))
                finally:
                    engine.reset()  # chats begin with empty slots, and learn draft lengths from themselves
                    holder.note_memory(engine)

        with self.chats.asking:  # nobody changes the engine between these steps
            engine = holder.engine()
            job = BenchmarkJob(run, runner.release)
            runner.reserve(job.stop)
            self._job = job
            job.start()


def _policies(names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        raise ConfigError("No policy is chosen: choose at least one.")
    return tuple(check_policy(name) for name in names)


def _lengths(texts: Sequence[str]) -> tuple[DraftLength, ...]:
    if not texts:
        raise ConfigError("No draft length is chosen: choose at least one.")
    return tuple(parse_draft_length(str(text)) for text in texts)


def _count(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"{name} {value} is out of range: use {low} to {high:,}.")
    return int(value)
