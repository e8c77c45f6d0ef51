"""Takes repeated work out of Triton's interpreter. Changes no result.

For a kernel the interpreter replaces the members of the language's modules by its own, and it does so again,
with a search through all members, for every call of a function within the kernel: a third of the time of a
kernel of many small functions. And it builds the same table of dtypes for every value, types and shapes of
values anew, which are few, computes checks that nobody looks at, and asks of every operation's operands how
to make them alike, which most are: another third.
"""

from __future__ import annotations

import inspect
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
    _leave_alike_alone(tl.core, interpreter.TritonSemantic)
    _skip_unused_checks(interpreter)
    _call_members_directly(interpreter)


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
        space = getattr(element_ty, "address_space", None)  # a pointer has one
        key = (element_ty.name, space), *[size if type(size) is int else size.value for size in shape]
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


def _leave_alike_alone(core: Any, semantic: Any) -> None:
    """Two values of one type are what the operation works on; a number is made a value of the other operand's
    type and shape once. Versions that ask for something else are left alone."""
    make_alike = semantic.binary_op_type_checking_impl
    asked = ["self", "lhs", "rhs", "allow_lhs_ptr", "allow_rhs_ptr", "arithmetic_check", "div_or_mod"]
    if list(inspect.signature(make_alike).parameters) != asked:
        return
    constants: dict[Any, Any] = {}

    def beside(self: Any, value: Any, number: Any, first: bool, flags: tuple[bool, ...]) -> Any:
        """The operands `value` and `number`, the number as a value; in the other order unless `first`."""
        element = value.type.scalar
        name = element.name if type(element) is core.dtype else None  # of a pointer it does not matter
        # a type's sizes are kept for good, see _share_types, and so stand for themselves
        sizes = id(value.type.shape) if value.type.is_block() else None
        key = type(number), number or str(number), name, sizes, first, flags  # 0.0 == -0.0
        if key not in constants:
            pair = (value, number) if first else (number, value)
            left, right = make_alike(self, *pair, *flags)
            if (left if first else right) is not value or len(constants) > 2000:
                return left, right  # the value had to be changed too
            constants[key] = right if first else left
            constants[key].handle.data.flags.writeable = False
        return (value, constants[key]) if first else (constants[key], value)

    def checked(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        kinds, flags = (type(lhs), type(rhs)), (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)
        if kinds == (core.tensor, core.tensor):
            of_one_type = type(lhs.dtype) is core.dtype and lhs.dtype.name == rhs.dtype.name
            if of_one_type and not div_or_mod:  # that makes 32 bits of 16
                return self.broadcast_impl_value(lhs, rhs)
        elif kinds[0] is core.tensor and kinds[1] in (int, float):
            return beside(self, lhs, rhs, True, flags)
        elif kinds[1] is core.tensor and kinds[0] in (int, float):
            return beside(self, rhs, lhs, False, flags)
        return make_alike(self, lhs, rhs, *flags)

    semantic.binary_op_type_checking_impl = checked


def _call_members_directly(interpreter: Any) -> None:
    """Not by two functions that hand on what they were given."""
    semantic = interpreter.interpreter_semantic

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)

        def direct(*given: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return inner(*given, **named)

        scope.set_attr(obj, name, direct)

    if list(inspect.signature(interpreter._patch_attr).parameters) == [
        "obj",
        "name",
        "member",
        "builder",
        "scope",
    ]:
        interpreter._patch_attr = patch
