"""Which message an edit is of, as the page notes it when the edit begins."""

from __future__ import annotations

import html
import json
import re

import pytest

from app.chat_file import Chat
from app.chat_tree import ChatMessage, MessageTree
from app.chats import ChatError
from app.edited import edited_node, edited_pictures, listed_html

CHAT = "c" * 32
QUESTION, ANSWER = ChatMessage("user", "one"), ChatMessage("assistant", "two", finish="stop")


def noted(tree: MessageTree, shown: int, name: str) -> str:
    found = re.search(f'data-{name}="([^"]*)"', listed_html(Chat(CHAT, "title", 1, 1, tree), shown))
    assert found is not None
    return html.unescape(found[1])


def test_a_list_tells_the_messages_of_its_places() -> None:
    tree = MessageTree.line([QUESTION, ANSWER] * 3)
    tree = tree.add(QUESTION, 3).add(ANSWER, 6)  # another version of the last question
    assert [edited_node(noted(tree, 40, "turn"), CHAT, place) for place in (0, 1)] == [6, 7]
    assert [edited_node(noted(tree, 40, "history"), CHAT, place) for place in range(4)] == [0, 1, 2, 3]
    assert [edited_node(noted(tree, 2, "history"), CHAT, place) for place in range(2)] == [2, 3]
    assert listed_html(None, 40) == ""


NOTED = json.dumps({"chat": CHAT, "nodes": [4, 5]})


@pytest.mark.parametrize(
    ("text", "chat_id", "place"),
    [
        (NOTED, "d" * 32, 0), (NOTED, None, 0), (NOTED, CHAT, 2), (NOTED, CHAT, -1), (NOTED, CHAT, "0"),
        ("", CHAT, 0), (None, CHAT, 0), ("{", CHAT, 0), ("[]", CHAT, 0), ("[" * 100_000, CHAT, 0),
        (json.dumps({"chat": CHAT, "nodes": 3}), CHAT, 0),
        (json.dumps({"chat": CHAT, "nodes": ["4"]}), CHAT, 0),
    ],
)  # fmt: skip
def test_an_edit_of_a_message_that_nobody_knows_is_refused(
    text: object, chat_id: str | None, place: object
) -> None:
    with pytest.raises(ChatError, match="changed meanwhile"):
        edited_node(text, chat_id, place)


def test_an_edit_has_the_pictures_that_it_is_sent_with() -> None:
    def told(images: object) -> str:
        return json.dumps({**json.loads(NOTED), "images": images})

    assert edited_pictures(NOTED) is edited_pictures("") is edited_pictures("[]") is None, "those that it had"
    assert edited_pictures(told([])) == () and edited_pictures(told(["a" * 64])) == ("a" * 64,)
    for images in ("x", [1], ["../x"], {}):
        with pytest.raises(ChatError, match="A picture was not attached"):
            edited_pictures(told(images))
