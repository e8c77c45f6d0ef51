"""Rules, in llguidance's Lark, of calls that are written as functions with parameters in tags, whose values
have no quotes (Qwen3-Coder's, Qwen3.5's and Nemotron 3's): names are those of the tool, values that are no
texts are JSON of their schema, and few required parameters are all there, once. Chooses no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from localmoe.chat.parameter_rules import (
    held_names,
    in_any_order,
    properties_of,
    schema_of,
    takes_others,
    written,
)
from localmoe.core.tools import Tool

# a value may hold what ends one, so it ends where another one begins, or all of them end; where but one of
# both may come, it does not hold what looks like the other: a model that writes that means it
_RULES = (
    'GAP: /[ \\n]{0,2}/\nmore: GAP "<parameter="\nlast: GAP "</function>"\n'
    "text_more[lazy]: MORE\ntext_last[lazy]: LAST\n"
    "text_only_more[lazy]: MORE & ~/(?s:.*)<\\/parameter>[ \\n]{0,2}<\\/(?s:.*)/\n"
    "text_only_last[lazy]: LAST & ~/(?s:.*)<\\/parameter>[ \\n]{0,2}<p(?s:.*)/\n"
    "MORE: /(?s:.*)<\\/parameter>[ \\n]{0,2}<parameter=/\n"
    "LAST: /(?s:.*)<\\/parameter>[ \\n]{0,2}<\\/function>/\n"
)


def function_rules(marks: Sequence[int], tools: Sequence[Tool]) -> str | None:
    """The rule of a `call` and what it needs; None: a name would need escapes.

    Args:
        marks: tokens before and behind a call.
        tools: of names without escapes.
    """
    rules = [_function(i, tool) for i, tool in enumerate(tools)]
    if None in rules:
        return None
    names = " | ".join(f"function{i}" for i in range(len(tools)))
    call = f"call: <[{marks[0]}]> GAP ({names}) GAP <[{marks[1]}]>\n"
    return call + _RULES + "".join(rule or "" for rule in rules)


def _function(number: int, tool: Tool) -> str | None:
    schema = schema_of(tool)
    known = properties_of(schema)
    if known is None:
        return None
    held, ways, rules = held_names(schema, known), _Ways(), []
    for place, (name, value) in enumerate(known.items()):
        rule = None if name in tool.texts else written(value, schema)
        tag, one = json.dumps(f"{name}>"), f"pair{number}_{place}"
        if rule is None:
            rules.append(f'{one}: {tag} "\\n"?\n')
        else:
            rules.append(f'{one}: {tag} GAP value{number}_{place} GAP "</parameter>"\n')
            rules.append(f"value{number}_{place}: {rule}\n")
        ways.add(one, text=rule is None, held=name in held)
    if takes_others(schema):
        rules.append(f"pair{number}: /[^<>\\n]{{1,200}}>/\n")
        ways.add(f"pair{number}", text=True, held=False)
    pairs, none = in_any_order(f"of{number}", ways.held, ways.others(), ways.follow)
    begins = [f"more of{number}"] * bool(pairs) + ["last"] * none
    opening = json.dumps(f"<function={tool.name}>")
    return f"function{number}: {opening} ({' | '.join(begins)})\n{pairs}{''.join(rules)}"


class _Ways:
    """Rules of parameters, by what ends them."""

    def __init__(self) -> None:
        self.held: list[str] = []
        self._texts: list[str] = []
        self._others: list[str] = []

    def add(self, rule: str, *, text: bool, held: bool) -> None:
        if held:
            self.held.append(f"text {rule}" if text else rule)
        else:
            (self._texts if text else self._others).append(rule)

    def others(self) -> list[str]:
        """Those that may be missing, as two rules at most."""
        texts, others = " | ".join(self._texts), " | ".join(self._others)
        return [f"text ({texts})"] * bool(texts) + [f"({others})"] * bool(others)

    @staticmethod
    def follow(rule: str, more: str, ends: bool) -> str:
        if not rule.startswith("text "):
            ends_in = [f"more {more}"] * bool(more) + ["last"] * ends
        elif more and ends:
            ends_in = [f"text_more {more}", "text_last"]
        else:
            ends_in = [f"text_only_more {more}" if more else "text_only_last"]
        return f"{rule.removeprefix('text ')} ({' | '.join(ends_in)})"
