"""Takes repeated work out of Triton's interpreter. Changes no result.

For a kernel the interpreter replaces the members of the language's modules by its own, after a search through
all of them, and it does so again for every call of a function within the kernel. It builds the same table of
dtypes for every value, and types and shapes of values anew, which are few; it computes checks that nobody
looks at; and it finds out anew what each operation does with operands of the same types.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from support.quick_builder import quicken_builder
from support.replayed_operations import replayed


def quicken_interpreter() -> None:
    """Have it done once a kernel, in this process; versions without a scope to undo it are left alone."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    replace_members = interpreter._patch_lang
    changes: list[tuple[Any, str, Any, Any]] = []  # object, name, what was there, what is there in a kernel
    nothing = interpreter._LangPatchScope()

    def patch_lang(fn: Any) -> Any:
        if changes and tl.load is changes[0][-1]:  # within a kernel, at whose end all is put back
            return nothing
        scope = interpreter._LangPatchScope()
        if not changes:
            scope = replace_members(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
            before: dict[tuple[Any, str], Any] = {}
            for place, name, value in scope._changes:
                before.setdefault((place, name), value)
            for (place, name), value in before.items():
                changes.append((place, name, value, inspect.getattr_static(place, name)))
            changes.sort(key=lambda change: change[:2] != (tl, "load"))
            return scope
        for place, name, value, now in changes:
            scope._changes.append((place, name, value))
            setattr(place, name, now)
        return scope

    scalar_dtype = cache(interpreter._get_np_dtype)

    def numpy_dtype(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return pointer_dtype if isinstance(element, tl.pointer_type) else scalar_dtype(element)

    pointer_dtype = interpreter._get_np_dtype(tl.pointer_type(tl.int8))
    interpreter._patch_lang = patch_lang
    interpreter._get_np_dtype = numpy_dtype
    quicken_builder(tl.core, interpreter)
    _skip_unused_checks(interpreter)
    if _share_types(tl.core):
        _replay_members(tl.core, interpreter)


def _skip_unused_checks(interpreter: Any) -> None:
    """Whether a sum of integers overflows is computed, and asserted where there is debugging alone."""
    options = interpreter.InterpreterOptions

    def plain(*given: Any, **named: Any) -> Any:
        made = options(*given, **named)
        return made if made.debug else replace(made, sanitize_overflow=False)

    if {"debug", "sanitize_overflow"} <= options.__dataclass_fields__.keys():
        interpreter.InterpreterOptions = plain
        interpreter.interpreter_builder.options = plain()


def _share_types(core: Any) -> bool:
    """Values of one type share what is known of it, and the number of the type, `key`. Versions that keep
    something else are left alone."""
    make_type, make_value = core.block_type.__init__, core.tensor.__init__
    example = core.tensor(None, core.block_type(core.int32, [4, 2]))
    parts = {"element_ty", "shape", "numel", "name"}, {"handle", "shape", "numel", "type", "dtype"}
    if (example.type.__dict__.keys(), example.__dict__.keys()) != parts or not hasattr(
        example.shape, "values"
    ):
        return False
    types: dict[Any, dict[str, Any]] = {}
    sizes: dict[Any, Any] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    keys: dict[Any, int] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        space = getattr(element_ty, "address_space", None)  # a pointer has one
        key = (element_ty.name, space), *[size if type(size) is int else size.value for size in shape]
        if key not in types:
            make_type(self, element_ty, shape)
            self.shape = sizes.setdefault(key[1:], self.shape)
            types[key] = self.__dict__
        self.__dict__ = types[key]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        block = type.is_block()
        key = tuple(type.shape.values) if block else ()
        if key not in shapes:
            make_value(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]
        kind = type.scalar.name, getattr(type.scalar, "address_space", None), key if block else None
        self.key = keys.setdefault(kind, len(keys))

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    return True


def _replay_members(core: Any, interpreter: Any) -> None:
    """Not called by two functions that hand on what they were given either."""
    member_for = replayed(core, interpreter)

    def patch(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(place, name, member_for(name, member))

    asked = ["obj", "name", "member", "builder", "scope"]
    if list(inspect.signature(interpreter._patch_attr).parameters) == asked:
        interpreter._patch_attr = patch
