"""The one regular save that this process may be in, and those that other processes go on writing."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from adaptor.checkpoint import naming, publish
from adaptor.control import runtime
from adaptor.control.runtime import GENERATION


@dataclass
class _Save:
    root: Path
    step: int
    thread: int
    asynchronous: bool
    draft: Path | None = None  # on the rank that the framework lets write the tracker
    put_off: list[Callable[[], Any]] = field(default_factory=list)  # until it has its name

    @property
    def folder(self) -> Path:
        """Where it is written."""
        return self.root / naming.regular_name(self.step, _generation())

    def end(self) -> None:
        """It has its name."""
        while self.put_off:
            self.put_off.pop(0)()


_save: _Save | None = None
# Those of which only background processes know how far they are.
_written_on: list[_Save] = []


def _current() -> _Save | None:
    """A dump runs beside the main thread, and is no regular save."""
    return _save if _save is not None and _save.thread == threading.get_ident() else None


@contextlib.contextmanager
def regular(root: str, step: int, asynchronous: bool = False) -> Iterator[None]:
    """While the framework saves `step` below `root`.

    Args:
        asynchronous: it goes on writing in the background after that (`scheduled`).
    """
    global _save
    save = _save = _Save(Path(root), step, threading.get_ident(), asynchronous)
    try:
        yield
    finally:
        _save = None
        if save.draft is not None and not save.asynchronous:
            save.draft.unlink(missing_ok=True)
    if not asynchronous:
        save.end()


def renamed(path: str) -> str:
    """The path below the folder of the running save, if it is one."""
    save = _current()
    if save is None:
        return path
    try:
        below = Path(path).relative_to(save.root / naming.final_name(save.step))
    except ValueError:
        return path
    return str(save.folder / below)


def tracker(path: str) -> str:
    """Where the running save writes its tracker: nowhere, since that is done here.

    Every rank has written. Rank 0, which is to write the tracker, gives the folder its name and replaces the
    tracker; what the framework writes after that goes to a draft that holds the old one, for it reads that,
    too, and is removed. Other ranks ask for the name in passing.
    """
    save = _current()
    if save is None or runtime.get().rank != 0:
        return path
    if save.draft is None:
        draft = Path(f"{path}.{save.step}.saving")
        if Path(path).exists():
            shutil.copyfile(path, draft)
        if not save.asynchronous:
            _complete(save)
        save.draft = draft
    return str(save.draft)


def scheduled(request: Any, meet: Callable[[], Any] = lambda: None) -> None:
    """The framework puts off what is to be done when every rank has written: the name comes last of that.

    Args:
        request: Megatron's AsyncRequest, to which functions can be added.
        meet: returns when every rank has called it; where nobody has to know of the name, it need not.
    """
    save = _current()
    if save is None:
        return
    _written_on.append(save)

    def finalize() -> None:
        _written_on.remove(save)
        if save.draft is not None:
            _complete(save)
            save.draft.unlink(missing_ok=True)
        meet()
        save.end()

    request.add_finalize_fn(finalize)


def tell(path: str, tracker: str, listener: Callable[[str, str], Any]) -> None:
    """Tell `listener` of something in the folder of a save, and of its tracker, when both have their names.

    The rank that it is called on need not be the one that gives them: of a save that the framework goes on
    with, the end is behind a barrier.
    """
    for save in (*filter(None, [_current()]), *_written_on):
        with contextlib.suppress(ValueError):
            below = Path(path).relative_to(save.folder)
            named = (save.root / naming.final_name(save.step) / below, save.root / naming.TRACKER)
            save.put_off.append(partial(listener, *map(str, named)))
            return
    listener(path, tracker)


def _complete(save: _Save) -> None:
    publish.sync_regular(save.root, save.step, _generation())
    runtime.get().session.publishing(lambda: _publish(save))


def _publish(save: _Save) -> None:
    publish.publish_regular(save.root, save.step, _generation())
    publish.replace_tracker(save.root, save.step)


def _generation() -> str:
    return os.environ.get(GENERATION, "")
