"""Reads pickles of a framework without the framework."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch


class _Stranger:
    """Stands in for an object of one of the framework's classes."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


_strangers: dict[tuple[str, str], type] = {}


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] in ("megatron", "transformer_engine"):
            return _strangers.setdefault((module, name), type(name, (_Stranger,), {}))
        return super().find_class(module, name)


def load(file: Path | IO[bytes]) -> Any:
    """Return the content of a torch archive that a job of the tests has written."""
    pickling = SimpleNamespace(Unpickler=Unpickler, __name__="pickle")
    return torch.load(file, map_location="cpu", weights_only=False, pickle_module=pickling)
