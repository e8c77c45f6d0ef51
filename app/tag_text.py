"""Tags in a message as text: Markdown takes what looks like HTML for HTML, so that of "put List<String> into
a <div>" the page would show "put List into a", and nothing at all behind a <textarea>. Nor does it show
"[INFO]: Ready", which is the address of a link to it, and "&nbsp;". Code and formulas stay as they are: there
Markdown does the same; but what is a formula between single dollars is put into brackets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

# "<", "[" and "&" that are shown; as nobody writes them in this way, they can be taken back (copying.js)
LESS, BRACKET, AND = "&#0060;", "&#0091;", "&#0038;"
_FORMULAS = (("$$", "$$"), (r"\[", r"\]"), (r"\(", r"\)"))  # in the order in which the Chatbot takes them
# the Chatbot would take "$5 and $6" for one
_DOLLARS = re.compile(
    r"(?<![\\$A-Za-z0-9_])\$(?=[^\s$])((?:[^$\n\\`\0]|\\[^()\n]){0,299}?(?:[^$\s\\`\0]|\\[^()\n]))\$(?![A-Za-z0-9_$])"
)
_SET = r"\(\relax "  # which TeX makes nothing of: as LESS
_IN_BRACKETS = re.compile(rf"{re.escape(_SET)}(.*?)\\\)")
_COMMAND = re.compile(r"\\[A-Za-z]+\s*(?:\{[^{}]*\})?")
_PROSE = re.compile(  # of languages with spaces, and without
    r"^[0-9].*?[^\W\d_]{3}|[^\W\d_]{3,}[ ,]+[^\W\d_]{2,}|[\u3000-\u9fff\uac00-\ud7af\uff00-\uffef]"
)
_FENCE = re.compile(r"[\s>]*(?:(?:[-*+]|\d{1,9}[.)])\s+)*(`{3,}(?=[^`]*$)|~{3,})")
_ITEM = re.compile(r" {0,3}(?:[-*+]|\d{1,9}[.)])(?:\s|$)")  # of a list
_TICKS = re.compile(r"`+")
_LAYOUT = r"<(sub|sup|kbd|b|i|u|s|em|strong|small|mark)>[^<\n]*</\1>|<br ?/?>"
_LABEL = r"\[(?=((?:[^\[\]\\]|\\.){1,999})\]:)"
_ADDRESS = re.compile(rf"^((?:[ \t>]|[-*+][ \t]|\d{{1,9}}[.)][ \t])*){_LABEL}", re.MULTILINE)
_REFERENCE = re.compile(r"\[((?:[^\[\]\\]|\\.){1,999})\](?!:)")
_ENTITY = r"&(?=(?:#\d{1,7}|#[xX][0-9A-Fa-f]{1,6}|[A-Za-z][A-Za-z0-9]{1,31});)"
_TAG = re.compile(rf"<(?:https?://|mailto:)[^\s<>]*>|(?<!\\)<(?=[A-Za-z/!?])|(?<!\\){_ENTITY}")
_TAG_OR_LAYOUT = re.compile(rf"<(?:https?://|mailto:)[^\s<>]*>|{_LAYOUT}|(?<!\\)<(?=[A-Za-z/!?])")


def tags_as_text(text: str, *, layout: bool = False) -> str:
    """For a Chatbot. layout: what models use within a line, such as <br>, &nbsp; and H<sub>2</sub>O, stays
    HTML, and the addresses of links that are there stay what they are."""
    if not any(sign in text for sign in ("<", "]:", "$", *(() if layout else ("&",)))):
        return text
    text = text.replace("\0", "")
    hidden: list[str] = []
    for left, right in _FORMULAS:
        text = _hide(text, left, right, hidden)
    tag = _TAG_OR_LAYOUT if layout else _TAG
    links = {label.casefold() for label in _REFERENCE.findall(text)} if layout and "]:" in text else set()

    def formula(found: re.Match[str]) -> str:
        if _PROSE.search(_COMMAND.sub("", found[1])):  # "$10 are less than 12$"
            return found[0]
        hidden.append(rf"{_SET}{found[1]}\)")
        return f"\0{len(hidden) - 1}\0"

    def shown(part: str) -> str:
        part = _DOLLARS.sub(formula, part)
        return _ADDRESS.sub(lambda found: _address(found, links), tag.sub(_shown, part))

    parts = (part if code else _outside_spans(part, shown) for part, code in _parts(text))
    return _back("\n".join(parts), hidden)


def written(shown: str) -> str:
    """The other way."""
    shown = _IN_BRACKETS.sub(lambda found: f"${found[1]}$", shown)
    return shown.replace(LESS, "<").replace(BRACKET, "[").replace(AND, "&")


def _hide(text: str, left: str, right: str, hidden: list[str]) -> str:
    """With a number in the place of each formula."""
    parts, place = [], 0
    while (begin := text.find(left, place)) >= 0:
        end = text.find(right, begin + len(left) + 1)
        if end < 0:
            break
        parts += [text[place:begin], f"\0{len(hidden)}\0"]
        place = end + len(right)
        hidden.append(_back(text[begin:place], hidden))
    return "".join([*parts, text[place:]])


def _back(text: str, hidden: list[str]) -> str:
    return re.sub(r"\0(\d+)\0", lambda found: hidden[int(found[1])], text)


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """Paragraphs, and lines of code."""
    paragraph: list[str] = []
    fence, in_list, after_code = "", False, True
    for line in text.split("\n"):
        found = _FENCE.match(line)
        blank = not line.strip()
        indented = line.startswith(("    ", "\t")) and not in_list and after_code
        if not (fence or found or blank or indented):
            paragraph.append(line)
            in_list = bool(_ITEM.match(line)) or (in_list and (not after_code or line.startswith(" ")))
            after_code = False
            continue
        if paragraph:
            yield "\n".join(paragraph), False
            paragraph = []
        yield line, True
        after_code = True
        if fence:
            mark = line.strip(" \t>")
            fence = "" if mark.startswith(fence) and not mark.strip(fence[0]) else fence
        elif found:
            fence = found[1]
    if paragraph:
        yield "\n".join(paragraph), False


def _outside_spans(text: str, shown: Callable[[str], str]) -> str:
    """A paragraph whose spans of code stay: from a row of backticks to the next one of the same length."""
    rows = [found.span() for found in _TICKS.finditer(text)]
    ends: list[int | None] = []
    later: dict[int, int] = {}
    for begin, end in reversed(rows):
        ends.append(later.get(end - begin))
        later[end - begin] = end
    parts, place = [], 0
    for (begin, _), close in zip(rows, reversed(ends), strict=True):
        escaped = begin > 0 and text[begin - 1] == "\\"
        if close is None or begin < place or escaped:
            continue
        parts += [shown(text[place:begin]), text[begin:close]]
        place = close
    return "".join([*parts, shown(text[place:])])


def _shown(found: re.Match[str]) -> str:
    return {"<": LESS, "&": AND}.get(found[0], found[0])


def _address(found: re.Match[str], links: set[str]) -> str:
    """links: the labels that addresses are asked for by."""
    return found[0] if found[2].casefold() in links else f"{found[1]}{BRACKET}"
