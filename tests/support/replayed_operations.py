"""Operations of Triton's interpreter, replayed. Changes no result.

What an operation of a kernel does with its operands' values, among it conversions to one type and shape, is
found out anew each time by the code that builds a compiler's graph: most of the interpreter's time. But it
depends on the operands' types and shapes and on plain arguments alone. So it is written down the first time,
as calls of the interpreter's builder, and done without that code from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

_TWO_SIDED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
_BINARY = {f"__{side}{name}__" for side in ("", "r") for name in _TWO_SIDED}
_BINARY |= {f"__{name}__" for name in ("gt", "ge", "lt", "le", "eq", "ne")}
# what asks for nothing but its arguments, and returns values, tuples of them, or nothing
_REPLAYED = _BINARY | {
    "__neg__", "__invert__", "__not__", "__getitem__", "to", "cast", "load", "store", "where", "minimum",
    "maximum", "clamp", "abs", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "floor", "ceil",
    "fma", "erf", "div_rn", "sqrt_rn", "umulhi", "dot", "trans", "permute", "reshape", "view", "broadcast",
    "broadcast_to", "expand_dims", "join", "split", "full", "arange", "program_id", "num_programs",
    "atomic_add", "atomic_xchg",
}  # fmt: skip
# calls of the builder, beside its get_..., that give the same again: of constants they are called once
_PURE = {
    "create_splat", "create_make_range", "create_expand_dims", "create_broadcast", "create_bitcast",
    "create_int_cast", "create_si_to_fp", "create_ui_to_fp", "create_fp_to_si", "create_fp_to_ui",
    "create_fp_ext", "create_fp_trunc",
}  # fmt: skip


class _NotPlain(Exception):
    """An argument is neither a value nor a constant."""


class _Watched:
    """Stands for a value's data while an operation is written down: who looks at a number makes what follows
    depend on it."""

    def __init__(self, real: Any, name: str, record: _Record, constant: bool, free: bool = False) -> None:
        self.real, self.name, self.record, self.constant = real, name, record, constant
        self._free = free or constant

    @property
    def data(self) -> Any:
        if self.real.data.size == 1 and not self._free:  # of more of them only the shape can be asked for
            self.record.replayable = False
        return self.real.data

    def __bool__(self) -> bool:
        self.record.replayable = False
        return bool(self.real)

    def __getattr__(self, name: str) -> Any:
        self.record.replayable = False
        return getattr(self.real, name)


class _Record:
    """Stands for the builder during one operation, and writes down what is called."""

    def __init__(self, builder: Any, handle: type) -> None:
        self._builder, self._handle = builder, handle
        self.lines: list[str] = []
        self.constants: list[Any] = []
        self.replayable = True

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._builder, name)
        if not callable(member):
            return member
        pure = name.startswith("get_") or name in _PURE

        def call(*given: Any) -> Any:
            if self._handle in map(type, given):  # somebody made it of what nobody saw
                self.replayable = False
            result = member(*[value.real if type(value) is _Watched else value for value in given])
            several = type(result) is tuple
            parts = result if several else (result,)
            if result is not None and type(parts[0]) is not self._handle:
                self.replayable &= pure  # it is a type
                return result
            if pure and all(value.constant for value in given if type(value) is _Watched):
                result.data.flags.writeable = False
                return _Watched(result, self.name(result), self, True)
            names = [f"h{len(self.lines)}_{number}" for number in range(len(parts))]
            arguments = [value.name if type(value) is _Watched else self.name(value) for value in given]
            self.lines.append(f"{', '.join(names)} = {self.name(member)}({', '.join(arguments)})")
            if result is None:
                return None
            watched = tuple(
                _Watched(part, name, self, False) for part, name in zip(parts, names, strict=True)
            )
            return watched if several else watched[0]

        return call

    def name(self, value: Any) -> str:
        """Of a constant, in what is written down."""
        self.constants.append(value)
        return f"c{len(self.constants) - 1}"


def replayed(core: Any, interpreter: Any) -> Callable[[str, Any], Any]:
    """(name, member of the language) -> the same with the interpreter's semantic, replayed where possible."""
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    tensor, handle, new = core.tensor, interpreter.TensorHandle, object.__new__
    plain = {int, bool, str, type(None)}
    several = {tuple, list, core.tuple}

    def constant(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return kind, value
        if kind is float:
            return kind, value.hex()  # 0.0 is not -0.0, and a NaN is itself
        if kind is core.constexpr:
            return kind, constant(value.value)
        if kind in several:
            return kind, *map(constant, value)
        if kind is slice:
            return kind, constant(value.start), constant(value.stop), constant(value.step)
        if isinstance(value, core.dtype):
            return kind, value.name, getattr(value, "address_space", None)
        raise _NotPlain

    @cache
    def make(name: str, member: Any) -> Any:
        inner = getattr(member, "__wrapped__", member)
        plans: dict[Any, Any] = {}

        def directly(*given: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return inner(*given, **named)

        def first(key: Any, given: Any, named: Any) -> Any:
            if semantic.builder is not builder or key in plans:  # it is a part of one, or cannot be replayed
                return directly(*given, **named)
            result, plans[key] = write_down(name, directly, given, named)
            return result

        def replay(*given: Any, **named: Any) -> Any:
            if "_semantic" in named:  # it is a part of one
                return inner(*given, **named)
            key: list[Any] = []
            values: list[Any] = []
            try:
                for value in given:
                    if type(value) is tensor:
                        key.append(value.key)
                        values.append(value)
                    else:
                        key.append(constant(value))
                for word, value in named.items():
                    key.append(word)
                    if type(value) is tensor:
                        key.append(value.key)
                        values.append(value)
                    else:
                        key.append(constant(value))
            except _NotPlain:
                return directly(*given, **named)
            whole = tuple(key)
            plan = plans.get(whole)
            if plan is None or semantic.builder is not builder:
                return first(whole, given, named)
            return plan(*values)

        def binary(value: Any, other: Any, **named: Any) -> Any:
            """The same with less to look through."""
            if named or semantic.builder is not builder:
                return directly(value, other)
            try:
                key = value.key, other.key if type(other) is tensor else constant(other)
            except _NotPlain:
                return directly(value, other)
            plan = plans.get(key)
            if plan is None:
                return first(key, (value, other), {})
            return plan(value, other) if type(other) is tensor else plan(value)

        if name in _BINARY:
            return binary
        return replay if name in _REPLAYED else directly

    def write_down(name: str, operation: Any, given: Any, named: Any) -> tuple[Any, Any]:
        """What the operation returns, and the function of its values that returns it; None where numbers
        decided what was done."""
        record = _Record(builder, handle)
        own: list[Any] = []

        def watched(value: Any, word: str = "") -> Any:
            if type(value) is not tensor:
                return value
            # beside a single pointer a mask is asked for its truth before its shape, which is checked
            free = word == "mask" and name in ("load", "store") and not value.type.is_block()
            stand_in = _Watched(value.handle, f"v{len(own)}.handle", record, False, free)
            own.append(tensor(stand_in, value.type))
            return own[-1]

        in_place = [watched(value) for value in given]  # these first, as their names say
        by_name = {word: watched(value, word) for word, value in named.items()}
        semantic.builder = record
        try:
            result = operation(*in_place, **by_name)
        finally:
            semantic.builder = builder
        parts = result if type(result) in several else (result,)
        made = [remade(part, own, record) for part in parts]
        for part in parts:
            if type(part) is tensor and type(part.handle) is _Watched:
                real = part.handle.real  # of a constant, what is noted at it later is noted at it alone
                part.handle = handle(real.data, real.dtype) if part.handle.constant else real
        if not record.replayable:
            return result, None
        value = f"{record.name(type(result))}([{', '.join(made)}])" if parts is result else made[0]
        body = "\n  ".join([*record.lines, f"return {value}"])
        return result, _function(len(own), len(record.constants), body)(*record.constants)

    def remade(part: Any, own: list[Any], record: _Record) -> str:
        """How what an operation returns is made of what it was given and of what the builder returned."""
        if part is None:
            return "None"
        if type(part) is not tensor or type(part.handle) not in (_Watched, type(None)):
            record.replayable = False
            return ""
        for number, value in enumerate(own):
            if part is value:
                return f"v{number}"
        name = "None" if part.handle is None else part.handle.name
        if part.handle is not None and part.handle.constant:
            name = f"{record.name(handle)}({name}.data, {name}.dtype)"
        members = part.type, part.dtype, part.shape, part.numel, part.key
        return f"{record.name(again)}({', '.join([name, *map(record.name, members)])})"

    def again(handle: Any, type: Any, dtype: Any, shape: Any, numel: Any, key: Any) -> Any:
        value = new(tensor)
        value.handle, value.type, value.dtype, value.shape, value.numel = handle, type, dtype, shape, numel
        value.key = key
        return value

    return make


@cache
def _function(values: int, constants: int, body: str) -> Any:
    """constants -> the function of so many values."""
    names = ", ".join(f"v{number}" for number in range(values))
    free = ", ".join(f"c{number}" for number in range(constants))
    code: dict[str, Any] = {}
    exec(f"def made({free}):\n def function({names}):\n  {body}\n return function", code)
    return code["made"]
