"""Reads what a framework has pickled, without the framework."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch


class _Stranger:
    """Stands in for an object of a class of the framework."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


_strangers: dict[tuple[str, str], type] = {}


class Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "megatron":
            return _strangers.setdefault((module, name), type(name, (_Stranger,), {}))
        return super().find_class(module, name)


def load(file: Path | IO[bytes]) -> Any:
    """The content of an archive of torch that a test of ours has written."""
    pickling = SimpleNamespace(Unpickler=Unpickler, __name__="pickle")
    return torch.load(file, map_location="cpu", weights_only=False, pickle_module=pickling)
