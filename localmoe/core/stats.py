"""Statistics of one answer, computed from what ran. Counters are filled by the loop; nothing here is
estimated."""

from __future__ import annotations

from dataclasses import asdict, dataclass


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


@dataclass(slots=True)
class GenerationCounters:
    """Raw counts and times of one answer. Expert counts are of decode steps; prefill is counted apart."""

    prompt_tokens: int = 0
    reused_tokens: int = 0  # prompt tokens whose KV was there already, in the cache or kept in RAM
    read_tokens: int = 0  # of the others, those that have run, while the prompt is read
    unread_images: int = 0  # pictures that the vision encoder has to read before that
    new_tokens: int = 0
    ended: bool = False  # written, stopped or failed
    steps: int = 0
    drafted: int = 0
    left_out: int = 0  # drafted beyond that, and not worth verifying
    accepted: int = 0
    looked_up: int = 0  # of the drafted: in the text, in the place of a draft
    # per (step, layer, distinct expert) that the target asked for
    hits: int = 0
    late: int = 0
    misses: int = 0
    computed: int = 0  # by the CPU lane, in whole
    covered: int = 0  # hit, late, or neither and named by the draft's routing of this window
    # per (token, layer, chosen expert)
    token_hits: int = 0
    token_demands: int = 0
    # per (token, layer) that both draft and target routed
    routed_pairs: int = 0
    matched_pairs: int = 0
    ordered_pairs: int = 0  # of the matched: in the same order of importance
    prefetched: int = 0
    wasted: int = 0
    prefill_h2d_bytes: int = 0
    decode_h2d_bytes: int = 0
    cpu_bytes: int = 0  # of weights that the CPU lane read, whole experts and parts
    cpu_busy_s: float = 0.0
    cpu_jobs: int = 0
    cpu_waited: int = 0  # jobs that the GPU waited for
    cpu_ahead_bytes: int = 0  # of cpu_bytes: asked for before the job came
    prefill_disk_bytes: int = 0  # of experts that were read from the disk
    decode_disk_bytes: int = 0
    disk_busy_s: float = 0.0  # in which any of that was read
    ttft_s: float = 0.0
    decode_s: float = 0.0  # first token to last token
    draft_s: float = 0.0
    verify_s: float = 0.0
    stall_s: float | None = 0.0  # compute waiting for a copy; None where kernels wait, unseen
    peak_device_bytes: int = 0
    vram_budget_bytes: int = 0
    approximate: bool = False  # by the draft alone
    draft_aside: bool = False  # experts had the draft's device memory

    def freeze(self) -> GenerationStats:
        """The published statistics; a ratio over nothing is None."""
        demands = self.hits + self.late + self.misses + self.computed
        tpot_s = _ratio(self.decode_s, max(0, self.new_tokens - 1))
        return GenerationStats(
            prompt_tokens=self.prompt_tokens, reused_tokens=self.reused_tokens, new_tokens=self.new_tokens,
            ttft_s=self.ttft_s, tpot_s=tpot_s, tokens_per_s=_ratio(1.0, tpot_s) if tpot_s else None,
            steps=self.steps, drafted=self.drafted, left_out=self.left_out, accepted=self.accepted,
            looked_up=self.looked_up,
            acceptance_rate=_ratio(self.accepted, self.drafted),
            mean_draft_length=_ratio(self.drafted, self.steps),
            expert_demands=demands, hits=self.hits, late=self.late, misses=self.misses,
            computed=self.computed,
            hit_rate=_ratio(self.hits, demands), token_hit_rate=_ratio(self.token_hits, self.token_demands),
            expert_match_rate=_ratio(self.matched_pairs, self.routed_pairs),
            expert_order_match_rate=_ratio(self.ordered_pairs, self.routed_pairs),
            coverage_rate=_ratio(self.covered, demands),
            prefetched=self.prefetched, wasted=self.wasted,
            h2d_bytes=self.prefill_h2d_bytes + self.decode_h2d_bytes,
            prefill_h2d_bytes=self.prefill_h2d_bytes,
            h2d_bytes_per_token=_ratio(self.decode_h2d_bytes, max(0, self.new_tokens - 1)),
            cpu_bytes=self.cpu_bytes, cpu_busy_s=self.cpu_busy_s, cpu_jobs=self.cpu_jobs,
            cpu_waited=self.cpu_waited, cpu_ahead_bytes=self.cpu_ahead_bytes,
            disk_bytes=self.prefill_disk_bytes + self.decode_disk_bytes,
            disk_bytes_per_token=_ratio(self.decode_disk_bytes, max(0, self.new_tokens - 1)),
            disk_busy_s=self.disk_busy_s,
            draft_s=self.draft_s, verify_s=self.verify_s, stall_s=self.stall_s,
            peak_device_bytes=self.peak_device_bytes, vram_budget_bytes=self.vram_budget_bytes,
            approximate=self.approximate, draft_aside=self.draft_aside,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What `generate --json` prints under "stats" and the live panel shows. None: nothing ran that could
    be measured.

    tpot_s = decode time / (new tokens - 1); drafted = tokens that were verified, left_out = those that the
    draft proposed beyond and was too unsure of, or for a step that then drafted nothing or was not wanted;
    looked_up = those of drafted that were looked up in the text, by a model that has a draft at hand too;
    acceptance_rate = accepted / drafted; hit_rate = hits / expert_demands, where hit = in device memory
    when asked for, late = its copy was in flight, computed = by the CPU lane from its host record, miss =
    none of these; token_hit_rate counts every (token, layer, chosen expert) instead; expert_match_rate =
    share of (token, layer) whose draft top-k set equals the target's, and expert_order_match_rate the share
    where the order of importance agrees too; coverage_rate = share of expert_demands that were hit or late,
    or that the draft's routing of the same window had named; wasted = prefetched and not used before
    eviction; h2d_bytes_per_token counts decode copies only; cpu_bytes are of weights that the CPU lane
    read, in cpu_jobs jobs that took cpu_busy_s, and the GPU had to wait for cpu_waited of them;
    cpu_ahead_bytes of cpu_bytes were asked for before their job came, by the threads that then computed
    with them; disk_bytes are of experts that were read from the disk, of a model that RAM does not hold,
    while the disk was busy for disk_busy_s, and disk_bytes_per_token those of decoding.
    """

    prompt_tokens: int
    reused_tokens: int
    new_tokens: int
    ttft_s: float
    tpot_s: float | None
    tokens_per_s: float | None
    steps: int
    drafted: int
    left_out: int
    accepted: int
    looked_up: int
    acceptance_rate: float | None
    mean_draft_length: float | None
    expert_demands: int
    hits: int
    late: int
    misses: int
    computed: int
    hit_rate: float | None
    token_hit_rate: float | None
    expert_match_rate: float | None
    expert_order_match_rate: float | None
    coverage_rate: float | None
    prefetched: int
    wasted: int
    h2d_bytes: int
    prefill_h2d_bytes: int
    h2d_bytes_per_token: float | None
    cpu_bytes: int
    cpu_busy_s: float
    cpu_jobs: int
    cpu_waited: int
    cpu_ahead_bytes: int
    disk_bytes: int
    disk_bytes_per_token: float | None
    disk_busy_s: float
    draft_s: float
    verify_s: float
    stall_s: float | None
    peak_device_bytes: int
    vram_budget_bytes: int
    approximate: bool
    draft_aside: bool

    def as_dict(self) -> dict[str, int | float | None]:
        """Plain values in declaration order."""
        return asdict(self)
