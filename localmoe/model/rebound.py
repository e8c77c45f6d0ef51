"""Let one module's forward find something else under a name that its file looks up."""

from __future__ import annotations

import inspect
import types
from typing import Any


def looked_up(module: Any, name: str) -> Any:
    """What a module's own forward finds under a global name, if it can be given something else; else None."""
    function = inspect.unwrap(type(module).forward)
    code = getattr(function, "__code__", None)
    if code is None or code.co_freevars or name not in code.co_names:
        return None
    return function.__globals__.get(name)


def rebind(module: Any, name: str, value: Any) -> None:
    """Give it `value` there; see model.uninstall."""
    given = vars(module).get("forward")  # by an earlier call
    function = given.__func__ if isinstance(given, types.MethodType) else inspect.unwrap(type(module).forward)
    found = {**function.__globals__, name: value}
    changed = types.FunctionType(
        function.__code__, found, function.__name__, function.__defaults__, function.__closure__
    )
    changed.__kwdefaults__ = function.__kwdefaults__
    module.forward = types.MethodType(changed, module)
