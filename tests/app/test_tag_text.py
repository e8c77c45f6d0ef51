"""Tags in messages stay visible; code, formulas and links stay as they are."""

from __future__ import annotations

import time

import pytest

from app.tag_text import AND, BRACKET, LESS, tags_as_text, written


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("put List<String> into a <div>", "put List«String> into a «div>"),
        ("</p> <!-- note --> <?php <!DOCTYPE html>", "«/p> «!-- note --> «?php «!DOCTYPE html>"),
        ("x < y, 3<4 and a<b", "x < y, 3<4 and a«b"),  # only "<b" could be a tag
        ("`<a>` and ``b ` <c>`` and `<d", "`<a>` and ``b ` <c>`` and `«d"),
        ("one\\` <a> `two`", "one\\` «a> `two`"),
        ("```html\n<div>\n```\n<p>", "```html\n<div>\n```\n«p>"),
        ("~~~\n<a>\n```\n<b>\n~~~\n<c>", "~~~\n<a>\n```\n<b>\n~~~\n«c>"),
        ("1. x\n   ```\n   <b>\n   ```\n2. <i>", "1. x\n   ```\n   <b>\n   ```\n2. «i>"),
        ("```still being written\n<b>", "```still being written\n<b>"),
        ("so:\n\n    <b>\n\n    <i>\n\n<u>", "so:\n\n    <b>\n\n    <i>\n\n«u>"),  # code by its indentation
        ("so:\n    <b>", "so:\n    «b>"),  # the same paragraph
        ("- a\n\n    <b>", "- a\n\n    «b>"),  # a paragraph of the list
        (r"$$a<b$$ \(c<d\) \[e<f\] g<h", r"$$a<b$$ \(c<d\) \[e<f\] g«h"),
        (r"\(a<b", r"\(a«b"),
        ("<https://localhost/x> <mailto:a@b.c> <a@b>", "<https://localhost/x> <mailto:a@b.c> «a@b>"),
        (r"\<b>", r"\<b>"),  # a tag no more
        ("H<sub>2</sub>O<br>", "H«sub>2«/sub>O«br>"),
        ("[INFO]: Ready\n- [WARN]: Slow\n\n`[a]: b` [c]", "§INFO]: Ready\n- §WARN]: Slow\n\n`[a]: b` [c]"),
        ("> 1. [a]: b\n\n    [c]: d\n\n[e][a] [f]:\n[ ]", "> 1. §a]: b\n\n    [c]: d\n\n[e][a] [f]:\n[ ]"),
        ("a&nbsp;b &lt;i> `&lt;` &#0060; R&D; AT&T & x", "a¤nbsp;b ¤lt;i> `&lt;` ¤#0060; R&D; AT&T & x"),
    ],
)  # fmt: skip
def test_tags_are_text(text: str, shown: str) -> None:
    found = tags_as_text(text)
    assert found == shown.replace("«", LESS).replace("§", BRACKET).replace("¤", AND)
    assert written(found) == text


@pytest.mark.parametrize(
    "text",
    [
        "so ⟦x^2⟧, ⟦a<b⟧ and ⟦\\frac{1}{2}⟧.", "(⟦n⟧) ⟦5 \\times 3⟧: ⟦2x⟧ ⟦-1⟧",
        "⟦x \\text{ if and only if } y⟧", "**⟦a_1⟧** is ⟦a_2 * b_2 * c⟧", "a | ⟦O(n \\log n)⟧ | b",
        "⟦loss⟧ `$x$` ⟦\\{1\\}⟧", "- ⟦x⟧\n\n    $y$",
        "函数⟦f(x)⟧的导数是⟦f'(x) = 2x \\text{约}⟧。",
    ],
)  # fmt: skip
def test_formulas_between_single_dollars_are_set(text: str) -> None:
    original = text.replace("⟦", "$").replace("⟧", "$")
    if "    $y$" in text:  # of a list: no code
        text = text.replace("$y$", "⟦y⟧")
    for layout in (False, True):
        found = tags_as_text(original, layout=layout)
        assert found == text.replace("⟦", r"\(\relax ").replace("⟧", r"\)")
        assert written(found) == original


@pytest.mark.parametrize(
    "text",
    [
        "it costs $5 and $6", "$5/$6", "US$5 to CA$7", "$HOME/$USER:$PATH", "$10 (about 9€), or 12$.",
        "$ x $", "$a$b", r"\$x$", "$x", "$$", "$10 are less than 12$", "a $ b $ c", "$x\ny$", "$one two$",
        r"$a \(b\) c$", "$a $$b$$ c$", "`$a$`", "价格是$5。另一个是10$。", "从$5到10$之间",
        "цена $5 за штуку, или 10$.", "```sh\necho $a$\n```",
    ],
)  # fmt: skip
def test_other_dollars_stay(text: str) -> None:
    assert tags_as_text(text, layout=True) == text


def test_answers_keep_the_layout_of_a_line() -> None:
    text = "H<sub>2</sub>O<br>10<sup>3</sup> <b>bold</b>, and <b> begins it: <b onclick=1>x</b><sub>\n</sub>"
    found = tags_as_text(text, layout=True)
    assert found.startswith("H<sub>2</sub>O<br>10<sup>3</sup> <b>bold</b>, and &#0060;b> begins it")
    assert found.count(LESS) == 5 and written(found) == text


def test_addresses_of_links_in_answers_stay_where_there_are_such_links() -> None:
    text = "[Docs][1] say so.&nbsp;\n\n[1]: https://x.y/1\n[2]: https://x.y/2"
    assert tags_as_text(text, layout=True) == text.replace("[2]", f"{BRACKET}2]")


def test_long_texts_take_no_time() -> None:
    hostile = (
        r"\(" * 200_000,
        "``` ` <b> `` " * 40_000,
        "<b>" * 100_000,
        "$x " * 100_000,
        "$" * 200_000,
        "$x$ " * 50_000,
        "$\\" * 100_000,
        "- " * 100_000,
        "`\\" * 100_000,
        "[a" * 100_000 + "]:",
        "[\\" * 100_000,
        "\n- 1. [" * 50_000,
        "&a" * 100_000,
    )
    began = time.process_time()
    for text in hostile:
        tags_as_text(f"{text}<i>", layout=True)
    assert time.process_time() - began < 3.0
