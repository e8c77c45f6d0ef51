"""Rules, in llguidance's Lark, of calls that are written as functions with parameters in tags, whose values
have no quotes (Qwen3-Coder's, Qwen3.5's, Nemotron 3's and MiniMax M2's): names are those of the tool, values
that are no texts are JSON of their schema, and few required parameters are all there, once. Chooses no
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from localmoe.chat.parameter_rules import Order, Parameters, takes_others, words_of, written
from localmoe.core.tools import Tool


@dataclass(frozen=True, slots=True)
class Tags:
    """Of a notation.

    Attributes:
        function: before a tool's name. parameter: before a parameter's.
        named: behind either. end: of a function.
        begins: what a text may begin with, and end with, which is no part of it.
    """

    function: str
    parameter: str
    named: str
    end: str
    begins: str

    def rules(self) -> str:
        """A value may hold what ends one, so it ends where another one begins, or all of them end; where but
        one of both may come, it does not hold what looks like the other, as a model that writes it means."""
        more, last = (
            f"/(?s:.*)<\\/parameter>[ \\n]{{0,2}}{_regex(tag)}/" for tag in (self.parameter, self.end)
        )
        return (
            "GAP: /[ \\n]{0,2}/\n"
            f"more: GAP {json.dumps(self.parameter)}\nlast: GAP {json.dumps(self.end)}\n"
            "text_more[lazy]: MORE\ntext_last[lazy]: LAST\n"
            "text_only_more[lazy]: MORE & ~/(?s:.*)<\\/parameter>[ \\n]{0,2}<\\/(?s:.*)/\n"
            "text_only_last[lazy]: LAST & ~/(?s:.*)<\\/parameter>[ \\n]{0,2}<p(?s:.*)/\n"
            f"MORE: {more}\nLAST: {last}\n"
        )


FUNCTIONS = Tags("<function=", "<parameter=", ">", "</function>", '"\\n"?')
INVOKES = Tags('<invoke name="', '<parameter name="', '">', "</invoke>", "")


def function_rules(marks: Sequence[int], tools: Sequence[Tool], tags: Tags = FUNCTIONS) -> str | None:
    """The rule of a `call` and what it needs; None: a name would need escapes.

    Args:
        marks: tokens before and behind a call.
        tools: of names without escapes.
    """
    rules = [_function(i, tool, tags) for i, tool in enumerate(tools)]
    if None in rules:
        return None
    names = " | ".join(f"function{i}" for i in range(len(tools)))
    call = f"call: <[{marks[0]}]> GAP (called GAP)+ <[{marks[1]}]>\ncalled: {names}\n"
    return call + tags.rules() + "".join(rule or "" for rule in rules)


def _regex(text: str) -> str:
    return text.replace("/", "\\/")


def _function(number: int, tool: Tool, tags: Tags) -> str | None:
    parameters, order, rules = Parameters.of(tool), Order(), []
    if parameters is None:
        return None
    for place, (name, value) in enumerate(parameters.known.items()):
        is_text = name in tool.texts
        rule = words_of(value) if is_text else written(value, parameters.schema)
        tag, pair = json.dumps(name + tags.named), f"pair{number}_{place}"
        if rule is None:
            rules.append(f"{pair}: {tag} {tags.begins}\n")
        else:
            around = tags.begins if is_text else "GAP"
            rules.append(f'{pair}: {tag} {around} value{number}_{place} {around} "</parameter>"\n')
            rules.append(f"value{number}_{place}: {rule}\n")
        order.add(pair, "value" if rule else "text", held=name in parameters.held)
    if takes_others(parameters.schema):
        rules.append(f'pair{number}: /[^<>"\\n]{{1,200}}{tags.named}/\n')
        order.add(f"pair{number}", "text", held=False)
    pairs, none = order.rules(f"of{number}", _behind)
    begins = [f"more of{number}"] * bool(pairs) + ["last"] * none
    opening = json.dumps(f"{tags.function}{tool.name}{tags.named}")
    return f"function{number}: {opening} ({' | '.join(begins)})\n{pairs}{''.join(rules)}"


def _behind(kind: str, more: str, ends: bool) -> str:
    if kind == "value":
        return " | ".join([f"more {more}"] * bool(more) + ["last"] * ends)
    if more and ends:
        return f"text_more {more} | text_last"
    return f"text_only_more {more}" if more else "text_only_last"
