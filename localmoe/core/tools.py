"""Tools that a model may call, and its calls of them. Knows no model's notation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Tool:
    """A function that a model may call; nothing here runs it.

    Attributes:
        name: by which it is called.
        definition: JSON of an object with name, description and parameters (a JSON schema), as OpenAI's API
            has it in `tools[].function`.
    """

    name: str
    definition: str

    def as_dict(self) -> dict[str, Any]:
        """As chat templates take it."""
        return {"type": "function", "function": json.loads(self.definition)}

    @cached_property
    def texts(self) -> frozenset[str]:
        """Parameters that are texts by the schema: "5" is no number there."""
        parameters = json.loads(self.definition).get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        found = properties if isinstance(properties, dict) else {}
        return frozenset(name for name, schema in found.items() if _is_text(schema))


def _is_text(schema: Any) -> bool:
    """Also one that may be missing: null is told apart by no notation without quotes."""
    if not isinstance(schema, dict):
        return False
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return "string" in kinds and all(kind in ("string", "null") for kind in kinds)
    if kinds is None and isinstance(schema.get("enum"), list):
        return all(isinstance(value, str) for value in schema["enum"])
    return kinds == "string"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call.

    Attributes:
        arguments: JSON of an object.
        id: by which its result is told apart from other calls'.
    """

    name: str
    arguments: str
    id: str = ""
