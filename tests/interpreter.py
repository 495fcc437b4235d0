"""Triton's interpreter without what it does over and over for nothing; what it computes stays the same."""

from dataclasses import replace
from functools import cache


def quicken() -> None:
    """Leave out three things that take half of an interpreted kernel's time.

    Checks of 32-bit arithmetic for overflow, whose outcome is dropped where `debug` is off; a table of dtypes made for
    every operation; and the replacing of the language's functions at every call of a device function, where the launch
    around it has replaced them already.
    """
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    scalar = cache(interpreter._get_np_dtype)

    def np_dtype(dtype):
        while isinstance(dtype, tl.block_type):
            dtype = dtype.element_ty
        return np.dtype(np.uint64) if isinstance(dtype, tl.pointer_type) else scalar(dtype)

    patch, patched = interpreter._patch_lang, set()  # modules that are replaced in the launch that runs

    @cache
    def seen_by(fn):
        return frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)

    def patch_lang(fn):
        if seen_by(fn) <= patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        patched.update(seen_by(fn))
        undo = scope.restore
        scope.restore = lambda: (undo(), patched.clear())  # called by launches alone
        return scope

    interpreter._get_np_dtype, interpreter._patch_lang = np_dtype, patch_lang
