"""Takes repeated work out of Triton's interpreter. Changes no result.

For a kernel the interpreter replaces the members of the language's modules by its own, and it does so again,
with a search through all members, for every call of a function within the kernel: a third of the time of a
kernel of many small functions. And it builds the same table of dtypes for every value.
"""

from __future__ import annotations

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
