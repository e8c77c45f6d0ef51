"""Messages of a chat as a tree: an edited question and an answer written anew stand beside what was there
before. Knows no file and decides no behaviour."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

ROOT = -1  # the parent of a message that begins the chat


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. `finish` is None on an answer that was being written when the file was saved.

    Attributes:
        finish: "stop", "length", "cancelled" or "error"; answers only.
        error: the sentence shown under an answer that failed.
        stats: `GenerationStats.as_dict()` of an answer, plus "link" (how experts were copied).
        thought_s: how long a reasoning model thought before it answered, in seconds.
        runs: lengths of the parts of `content`, in characters: by the model itself, accepted from the draft,
            by the model itself, and so on; empty: not known.
        images: ids of pictures (see app/pictures.py) before the text; questions only.
    """

    role: Literal["user", "assistant"]
    content: str
    created: float = 0.0
    finish: str | None = None
    error: str = ""
    stats: dict[str, Any] = field(default_factory=dict)
    thought_s: float = 0.0
    runs: tuple[int, ...] = ()
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MessageTree:
    """Every version of every message; none is ever removed. A node is its number in `nodes`.

    Attributes:
        parents: the message that each one follows, always of a smaller number, or ROOT.
        leaf: the last message of the branch that is shown; ROOT where there is none.
    """

    nodes: tuple[ChatMessage, ...] = ()
    parents: tuple[int, ...] = ()
    leaf: int = ROOT

    @classmethod
    def line(cls, messages: Sequence[ChatMessage]) -> MessageTree:
        """One message after the other, without branches."""
        return cls(tuple(messages), tuple(range(ROOT, len(messages) - 1)), len(messages) - 1)

    def path(self) -> tuple[int, ...]:
        """Nodes of the branch that is shown, the first message first."""
        found, node = [], self.leaf
        while node != ROOT:
            found.append(node)
            node = self.parents[node]
        return tuple(reversed(found))

    def children(self) -> dict[int, list[int]]:
        """Parent (or ROOT) -> what follows it, the oldest first."""
        found: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(node)
        return found

    def images(self) -> Iterator[str]:
        """Ids of the pictures of all versions; one may come more than once."""
        for message in self.nodes:
            yield from message.images

    def add(self, message: ChatMessage, parent: int) -> MessageTree:
        """With another version after `parent`, which is shown."""
        return MessageTree((*self.nodes, message), (*self.parents, parent), len(self.nodes))

    def replaced(self, node: int, message: ChatMessage) -> MessageTree:
        """With other contents of a node."""
        return replace(self, nodes=(*self.nodes[:node], message, *self.nodes[node + 1 :]))

    def ending_at(self, leaf: int) -> MessageTree:
        """Showing the branch up to this node."""
        return replace(self, leaf=leaf)

    def showing(self, node: int) -> MessageTree:
        """Showing the newest branch through this node."""
        children = self.children()
        while node in children:
            node = children[node][-1]
        return replace(self, leaf=node)
