"""Takes repeated work out of Triton's interpreter. Changes no result.

For a kernel the interpreter replaces the members of the language's modules by its own, and it does so again,
with a search through all members, for every call of a function within the kernel: a third of the time of a
kernel of many small functions. And it builds the same table of dtypes for every value, types and shapes of
values anew, which are few, and computes checks that nobody looks at.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any


def quicken_interpreter() -> None:
    """Have it done once a kernel, in this process; versions without a scope to undo it are left alone."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    replace_members = interpreter._patch_lang

    @cache
    def modules_of(fn: Any) -> list[Any]:
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    def patch_lang(fn: Any) -> Any:
        within_a_kernel = not tl.core.is_builtin(tl.load)  # what a kernel replaced is put back at its end
        if within_a_kernel and not any(tl.core.is_builtin(module.load) for module in modules_of(fn)):
            return interpreter._LangPatchScope()
        return replace_members(fn)

    scalar_dtype = cache(interpreter._get_np_dtype)

    def numpy_dtype(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return pointer_dtype if isinstance(element, tl.pointer_type) else scalar_dtype(element)

    pointer_dtype = interpreter._get_np_dtype(tl.pointer_type(tl.int8))
    interpreter._patch_lang = patch_lang
    interpreter._get_np_dtype = numpy_dtype
    _share_types(tl.core, interpreter.TritonSemantic)
    _skip_unused_checks(interpreter)


def _skip_unused_checks(interpreter: Any) -> None:
    """Whether a sum of integers overflows is computed, and asserted where there is debugging alone."""
    options = interpreter.InterpreterOptions

    def plain(*given: Any, **named: Any) -> Any:
        made = options(*given, **named)
        return made if made.debug else replace(made, sanitize_overflow=False)

    if {"debug", "sanitize_overflow"} <= options.__dataclass_fields__.keys():
        interpreter.InterpreterOptions = plain
        interpreter.interpreter_builder.options = plain()


def _share_types(core: Any, semantic: Any) -> None:
    """Values of one type share what is known of it. Versions that keep something else are left alone."""
    make_type, make_value = core.block_type.__init__, core.tensor.__init__
    make_alike = semantic.broadcast_impl_value
    example = core.tensor(None, core.block_type(core.int32, [4, 2]))
    parts = {"element_ty", "shape", "numel", "name"}, {"handle", "shape", "numel", "type", "dtype"}
    if (example.type.__dict__.keys(), example.__dict__.keys()) != parts or not hasattr(
        example.shape, "values"
    ):
        return
    types: dict[Any, dict[str, Any]] = {}
    sizes: dict[Any, Any] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not core.dtype:  # a pointer's, of which there are many
            return make_type(self, element_ty, shape)  # type: ignore[no-any-return]
        key = element_ty.name, *[size if type(size) is int else size.value for size in shape]
        if key not in types:
            make_type(self, element_ty, shape)
            self.shape = sizes.setdefault(key[1:], self.shape)
            types[key] = self.__dict__
        self.__dict__ = types[key]

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in shapes:
            make_value(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    def broadcast(self: Any, left: Any, right: Any) -> Any:
        blocks = left.type.is_block(), right.type.is_block()
        if (blocks == (True, True) and left.type.shape is right.type.shape) or blocks == (False, False):
            return left, right
        return make_alike(self, left, right)

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    semantic.broadcast_impl_value = broadcast
