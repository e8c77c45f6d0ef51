"""Rules, in llguidance's Lark, of calls that are written as a name with keys and values behind it, without
quotes (GLM's, since 4.5, Laguna's and Ling 3's): names are those of the tool, values that are no texts are
JSON of their schema, and few required keys are all there, once. Chooses no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from localmoe.chat.parameter_rules import Order, Parameters, takes_others, words_of, written
from localmoe.core.tools import Tool

_KEY, _KEY_END, _VALUE, _VALUE_END = MARKS = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_GAP = "GAP: /[ \\n]{0,2}/\n"  # some templates break lines between all of these, others nowhere


def keyed_rules(
    marks: Sequence[int], tools: Sequence[Tool], vocabulary: Mapping[str, int], ends: Collection[int]
) -> str | None:
    """The rule of a `call` and what it needs; None: a name would need escapes.

    Args:
        marks: tokens before and behind a call.
        tools: of names without escapes.
        vocabulary: of tokens that are no text to a grammar.
        ends: tokens that end an answer, which no value holds.
    """
    key, key_end, value, value_end = (
        f"<[{vocabulary[mark]}]>" if mark in vocabulary else json.dumps(mark) for mark in MARKS
    )
    between = f"{key_end} GAP {value}"
    rules = [_called(i, tool, key, between) for i, tool in enumerate(tools)]
    if None in rules:
        return None
    if _VALUE_END in vocabulary:
        no_text = sorted({vocabulary[_VALUE_END], *ends})
        text = f"text: <[^{','.join(map(str, no_text))}]>* {value_end}\n"
    else:
        text = "text[lazy]: /(?s:.*)<\\/arg_value>/\n"
    names = " | ".join(f"called{i}" for i in range(len(tools)))
    call = f"call: <[{marks[0]}]> GAP ({names}) GAP <[{marks[1]}]>\n"
    ending = f"end: GAP word_end\nword_end: {value_end}\n"
    return f"{call}{_GAP}{text}{ending}" + "".join(rule or "" for rule in rules)


def _called(number: int, tool: Tool, key: str, between: str) -> str | None:
    parameters, order, rules = Parameters.of(tool), Order(), []
    if parameters is None:
        return None
    for place, (name, one) in enumerate(parameters.known.items()):
        is_text, pair = name in tool.texts, f"pair{number}_{place}"
        rule = words_of(one) if is_text else written(one, parameters.schema)
        value = "text"
        if rule is not None:
            rules.append(f"value{number}_{place}: {rule}\n")
            value = f"value{number}_{place} word_end" if is_text else f"GAP value{number}_{place} end"
        rules.append(f"{pair}: {key} {json.dumps(name)} {between} {value}\n")
        order.add(pair, "pair", held=name in parameters.held)
    if takes_others(parameters.schema):
        rules.append(f"pair{number}: {key} /[^<>\\n]{{1,200}}/ {between} text\n")
        order.add(f"pair{number}", "pair", held=False)
    pairs, none = order.rules(f"of{number}", _behind)
    behind = f"(GAP of{number}){'?' * none}" if pairs else ""
    return f"called{number}: {json.dumps(tool.name)} {behind}\n{pairs}{''.join(rules)}"


def _behind(kind: str, more: str, ends: bool) -> str:
    return f"(GAP {more}){'?' * ends}" if more else '""'
