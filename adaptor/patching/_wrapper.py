"""A function wrapper that is copied and pickled by reference.

wrapt's own refuses copy, deepcopy and pickle; Megatron deep-copies configs that hold functions and pickles
its arguments into every checkpoint. What comes out of here is what the plain function or method would have
given, so a checkpoint loads where the adaptor is not installed.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import wrapt

_Reduced = str | tuple[Any, tuple[Any, ...]]


class _BoundWrapper(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg]
    def __copy__(self) -> _BoundWrapper:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # As Python does for a bound method: the copied object's own method.
        instance = getattr(self.__wrapped__, "__self__", None)
        if instance is None or isinstance(instance, type):
            return self
        duplicate = copy.deepcopy(instance, memo)
        return self._self_parent.__get__(duplicate, type(duplicate))

    def __reduce_ex__(self, protocol: Any) -> _Reduced:
        instance = getattr(self.__wrapped__, "__self__", None)
        if instance is not None:
            return getattr, (instance, self.__name__)
        reduced: _Reduced = self._self_parent.__reduce_ex__(protocol)
        return (copy.copy, (self._self_parent,)) if isinstance(reduced, str) else reduced


class Wrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """`wrapt.FunctionWrapper` at `owner.name`, where `owner` is a module or a class."""

    __bound_function_wrapper__ = _BoundWrapper

    def __init__(self, wrapped: Any, wrapper: Any, enabled: Any, owner: Any, name: str) -> None:
        super().__init__(wrapped, wrapper, enabled=enabled)
        self._self_holder = owner
        self._self_name = name

    def __copy__(self) -> Wrapper:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Wrapper:
        return self

    def __reduce_ex__(self, protocol: Any) -> _Reduced:
        if isinstance(self._self_holder, type):
            return getattr, (self._self_holder, self._self_name)
        module = sys.modules.get(self._self_holder.__name__)
        if getattr(module, self._self_name, None) is self:
            return str(self._self_name)
        # Undone, but still held by someone: it stands for the original, and copy.copy() of a function is that
        # function.
        return copy.copy, (self.__wrapped__,)
