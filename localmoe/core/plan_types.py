"""The memory plan: who gets which device bytes. Made by hardware.plan, obeyed by the engine, shown by the
page."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Division of the VRAM budget, in bytes; `total_bytes` never exceeds `budget_bytes`.

    Attributes:
        shared_bytes: attention, norms, embeddings, routers, shared experts (used by draft and target alike),
            but for an input embedding that lies in host RAM.
        draft_bytes: what drafts (INT4 experts of all layers, or another model with its cache); 0 when
            drafting is off.
        kv_bytes: KV cache for `context` tokens (shared by draft and target).
        workspace_bytes: reserve for activations.
        slot_bytes, num_slots: size of one expert slot and how many there are.
        resident_share: num_slots / all routed experts, at most 1.
        drafting: whether a draft is loaded; `drafting_reason` says why not ("" if it is).
        draft_aside: it is, but experts have its device memory for now (engine.draft_place).
        host_bytes: host RAM for the expert records, and for what lies there beside them.
        disk_bytes: of a file with all expert records, of which RAM holds some; 0: all lie in RAM.
        ram_experts: how many RAM holds at a time, where they lie on the disk; 0 where not.
        host_embedding_bytes: of host_bytes, an input embedding's.
        host_aside_bytes: of host_bytes, those of keys and values that an answer overwrites on the device.
        in_place: experts are computed where their records lie, so that each has its slot there: slots take no
            memory of the budget.
        prefill_chunk: tokens of a prompt that the workspace has room for in one pass, where passes run whole.
    """

    budget_bytes: int
    context: int
    shared_bytes: int
    draft_bytes: int
    kv_bytes: int
    workspace_bytes: int
    slot_bytes: int
    num_slots: int
    resident_share: float
    drafting: bool
    drafting_reason: str
    host_bytes: int
    draft_aside: bool = False
    host_embedding_bytes: int = 0
    host_aside_bytes: int = 0
    disk_bytes: int = 0
    ram_experts: int = 0
    in_place: bool = False
    prefill_chunk: int = 1024

    @property
    def total_bytes(self) -> int:
        """Device bytes that the plan uses."""
        fixed = self.shared_bytes + self.draft_bytes + self.kv_bytes + self.workspace_bytes
        return fixed if self.in_place else fixed + self.slot_bytes * self.num_slots

    def as_dict(self) -> dict[str, int | float | bool | str]:
        """Plain values for --json."""
        return {**asdict(self), "total_bytes": self.total_bytes}
