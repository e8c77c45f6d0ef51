"""All tables by name, as --tables takes them. Runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from localmoe.core.errors import ConfigError
from localmoe.tables.section import Table
from localmoe.tables.sharing import CONTEXT, SHAPE
from localmoe.tables.speq_fig6 import FIG6
from localmoe.tables.speq_fig13 import FIG13
from localmoe.tables.speq_table3 import TABLE3
from localmoe.tables.speq_table4 import TABLE4
from localmoe.tables.spmoe_fig12 import SP_FIG12
from localmoe.tables.spmoe_fig14 import SP_FIG14
from localmoe.tables.spmoe_table3 import SP_TABLE3

TABLE2 = Table(  # of all runs together: registry and page know it by name
    "2",
    "Memory of draft and target by what they share",
    "MoE-SpeQ, table 2",
    f"Bytes of {SHAPE} with a context of {CONTEXT:,} tokens, from its shape (no weight is read), in 2^30 "
    "bytes as in the paper, whose figures are those of the experts of one token a layer for draft (INT4) "
    "and target. What loaded engines allocated (shared weights and KV cache once, the draft, the slots) "
    "stands below. The last step counts the workspace too, which two engines would have twice, and the "
    "paper does not mention.",
    lambda subject: [],
    lambda run: None,
)
TABLES: Mapping[str, Table] = MappingProxyType(
    {t.name: t for t in (TABLE2, TABLE3, TABLE4, FIG6, FIG13, SP_TABLE3, SP_FIG12, SP_FIG14)}
)


def check_tables(names: Sequence[str]) -> tuple[str, ...]:
    """The names themselves, without repeats, if there are such tables.

    Raises:
        ConfigError: there is no table of a name.
    """
    for name in names:
        if name not in TABLES:
            raise ConfigError(f"There is no table '{name}': choose from {', '.join(TABLES)}.")
    return tuple(dict.fromkeys(names))
