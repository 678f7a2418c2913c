"""Reads Megatron's checkpoints of the format torch without the framework."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


class _Opaque:
    """An object of the framework: its attributes without its functions."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Opaque:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.made_of = args

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("megatron", "mindspeed", "mindspeed_llm"):
            return _Opaque
        return super().find_class(module, name)


class _Pickle:
    """A pickle module for torch.load."""

    Unpickler = _Unpickler
    load = staticmethod(lambda file, **kwargs: _Unpickler(file, **kwargs).load())


def newest(folder: Path) -> Path:
    """Return the newest checkpoint below a folder with a tracker. Raises ValueError."""
    tracker = folder / "latest_checkpointed_iteration.txt"
    try:
        name = tracker.read_text().strip()
    except OSError:
        raise ValueError(f"{tracker} is missing: the checkpoint has moved, or was never written") from None
    checkpoint = folder / (name if name == "release" else f"iter_{int(name):07d}" if name.isdigit() else "?")
    if not checkpoint.is_dir():
        raise ValueError(f"{tracker} says {name!r}, and {checkpoint} is no folder")
    return checkpoint


def files(folder: Path) -> list[Path]:
    """Return the files of a checkpoint that hold tensors, sorted."""
    return sorted(path for path in folder.rglob("*.pt") if path.is_file())


def load(path: Path) -> dict[str, Any]:
    """Return the content of one file. Raises ValueError if the file is damaged."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=False, pickle_module=_Pickle)
    except (RuntimeError, OSError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    return dict(content)


def model_of(folder: Path) -> dict[str, Any]:
    """Return the model's tensors in the first rank's file of the newest checkpoint. Raises ValueError."""
    for path in files(newest(folder)):
        content = load(path)
        if "model" in content:
            return dict(content["model"])
    raise ValueError(f"{newest(folder)} has no file with a model")


def flat(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each tensor, number and text with its path."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from flat(value, f"{path}/{key}")
    elif isinstance(content, (list, tuple)):
        for number, value in enumerate(content):
            yield from flat(value, f"{path}/{number}")
    else:
        yield path, content
