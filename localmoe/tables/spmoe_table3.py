"""SP-MoE, table 3: hit rates by system and prompts. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping

from localmoe.tables.cells import Cell, Subject
from localmoe.tables.datasets import title_of
from localmoe.tables.section import Bars, Section, Table, mean, percent, points, value
from localmoe.tables.speq_fig13 import cell_of
from localmoe.tables.store import Run

SYSTEMS = (
    "on-demand with drafting", "moe-infinity with drafting", "adapmoe with drafting", "sp-moe", "moe-speq",
)  # fmt: skip
# SP-MoE, table 3, in %: Mixtral-Offloading, MoE-Infinity, AdapMoE, SP-MoE
PAPER: Mapping[str, Mapping[str, tuple[float, float, float, float]]] = {
    "Mixtral 8x7B": {
        "HumanEval": (15.08, 16.01, 41.83, 18.93), "BigBench": (15.14, 15.83, 42.82, 21.39),
        "WikiText-103": (15.14, 15.76, 42.55, 21.19), "MMLU-Pro": (14.73, 15.87, 41.35, 21.06),
        "average": (15.02, 15.87, 42.14, 20.89),
    },
    "Phi-3.5-MoE": {
        "HumanEval": (35.37, 15.28, 56.22, 44.31), "BigBench": (22.36, 14.71, 45.14, 41.38),
        "WikiText-103": (28.37, 14.62, 50.39, 43.22), "MMLU-Pro": (24.30, 14.07, 45.97, 41.97),
        "average": (27.60, 14.67, 49.43, 42.72),
    },
    "DeepSeek-V2-Lite": {
        "HumanEval": (14.60, 16.57, 18.74, 36.85), "BigBench": (17.50, 16.34, 21.80, 41.25),
        "WikiText-103": (21.53, 17.27, 25.15, 42.20), "MMLU-Pro": (17.04, 16.74, 21.72, 39.92),
        "average": (17.67, 16.73, 21.85, 40.06),
    },
}  # fmt: skip


def _cells(subject: Subject) -> list[Cell]:
    return [cell_of(subject, system, name, "low") for name in subject.datasets for system in SYSTEMS]


def _section(run: Run) -> Section | None:
    found = {
        name: [value(run.get(cell_of(run.subject, s, name, "low")), "token_hit_rate") for s in SYSTEMS]
        for name in run.subject.datasets
    }
    if all(v is None for row in found.values() for v in row):
        return None
    average = [mean([row[i] for row in found.values()]) for i in range(len(SYSTEMS))]
    rows = [[title_of(name), *(percent(v, 2) for v in row)] for name, row in found.items()]
    rows.append(["average", *(percent(v, 2) for v in average)])
    for model, by_dataset in PAPER.items():
        for name, figures in by_dataset.items():
            rows.append([f"paper, {model}: {name}", *(points(v) for v in figures), "-"])
    groups = [("here", tuple(None if v is None else 100 * v for v in average))]
    groups += [(f"paper, {model}", (*by["average"], None)) for model, by in PAPER.items()]
    section = Section(
        ("prompts", *SYSTEMS),
        rows,
        [Bars("Token hit rate, average, %", "%", SYSTEMS, tuple(groups))],
    )
    lowest = min(by["average"][3] for by in PAPER.values())
    on_demand, sp_moe, moe_speq = average[0], average[3], average[4]
    if sp_moe is not None and 100 * sp_moe < lowest:
        if on_demand is not None and sp_moe < on_demand:
            section.reasons.append(
                "sp-moe evicts what was used longest ago of all layers: where a window asks for more "
                "experts than there are slots, each pass displaces what its later layers still held, which "
                "an LRU a layer (on-demand's) does not. Its prefetches do not make up for that here."
            )
        else:
            section.reasons.append(
                "sp-moe's cutoff is solved from this machine's rates: few copies fit into the time of "
                "drafting here, so that it prefetches for few layers."
            )
    if sp_moe is not None and moe_speq is not None and moe_speq < sp_moe:
        section.reasons.append(
            "moe-speq holds back what the link cannot copy in time; sp-moe asks for it and has more hits, "
            "at the price of more bytes copied."
        )
    if run.subject.whole_passes:
        section.reasons.append(
            "Where whole passes run on a GPU, of moe-infinity and adapmoe the cache alone is left, since "
            "they decide within a pass."
        )
    return section


SP_TABLE3 = Table(
    "sp3",
    "Hit rates by system and prompts",
    "SP-MoE, table 3",
    "The share of every (token, layer, chosen expert) of the verified windows that was in device memory "
    "when its layer asked for it, at table 3's low budget of MoE-SpeQ; all systems draft. WikiText-2 has "
    "the test articles of WikiText-103; BigBench and MMLU-Pro were not at hand, the other sets stand "
    "beside them.",
    _cells,
    _section,
)
