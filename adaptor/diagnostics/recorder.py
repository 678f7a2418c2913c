"""Records chosen steps of this rank for people (TTP_PROFILE, TTP_DUMP), and never in the way of training.

The session tells when steps begin and end. Whatever fails in here is said in one line, and ends the recording
alone; files are written by a thread of their own, whose disk may hang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from adaptor import output, text
from adaptor.context import Context
from adaptor.diagnostics import requests
from adaptor.errors import ConfigError
from adaptor.protocol.environment import Generation, Place, Scratch

if TYPE_CHECKING:
    import torch

# At the end of the script: what a disk that works has written by then.
_END_S = 30.0


class Recording(Protocol):
    """One of the things that are recorded; it is called on the main thread, and may raise anything."""

    def begin_step(self, step: int) -> None: ...

    def before_update(self) -> None:
        """Gradients are complete, the update comes next, or is skipped."""

    def end_step(self, step: int) -> None:
        """The step is over, or nobody knows and the next one begins."""

    def close(self) -> None:
        """There is no further step; a second call does nothing."""


class Recorder:
    """The recordings of this process, a part of its context; without a request it does nothing."""

    def __init__(self, context: Context) -> None:
        self._settings = context.settings
        self._rank = context.part(Place).rank
        self._generation = context.part(Generation)
        self._scratch = context.part(Scratch).path
        self._log_path = Path(self._settings.log_path).resolve()
        self._models: Sequence[torch.nn.Module] = ()
        self._running: dict[str, Recording] = {}
        self._step = -1
        self._has_begun = False  # a step of what is recorded now
        self._writer = output.Writer("ttp-recorder")

    def require_ranks(self, world_size: int) -> None:
        """Refuse ranks that the job does not have. Raises ConfigError."""
        for variable, request in self._requests():
            if request is not None and request.ranks.last >= world_size:
                raise ConfigError(
                    f"{variable} has the ranks {request.ranks}: this job has the ranks 0 to {world_size - 1}"
                )

    def watch(self, models: Sequence[torch.nn.Module]) -> None:
        """Record steps from now on.

        Args:
            models: the chunks of the model on this rank, unwrapped.
        """
        if self._has_begun:
            self.close()
        self._running.clear()  # without a step there is nothing to close, and nothing to say
        self._has_begun = False
        self._models = models
        folder = self._log_path / "-".join(filter(None, ("record", self._generation.name[:8])))
        for variable, request in self._requests():
            if request is None or self._rank not in request.ranks:
                continue
            with self._guard(variable):
                self._running[variable] = self._make(request, folder)

    def begin_step(self, step: int) -> None:
        """Note that `step` begins; an earlier one has ended, unless `end_step` has said so."""
        if not self._running:
            return
        self.end_step()
        self._step, self._has_begun = step, True
        self._each(lambda recording: recording.begin_step(step))

    def before_update(self) -> None:
        """Note that the gradients of the step are complete."""
        if self._running:
            self._each(lambda recording: recording.before_update())

    def end_step(self) -> None:
        """Note that the step has ended; without one it does nothing."""
        if self._running and self._step >= 0:
            step, self._step = self._step, -1
            self._each(lambda recording: recording.end_step(step))

    def close(self) -> None:
        """Note that no further step comes in this process; wait for a bounded time until all is written."""
        if not self._running:
            return
        self.end_step()
        self._each(lambda recording: recording.close())
        self._running.clear()
        self._writer.drain(_END_S)

    def _requests(self) -> tuple[tuple[str, requests.Profile | requests.Dump | None], ...]:
        return (("TTP_PROFILE", self._settings.profile), ("TTP_DUMP", self._settings.dump))

    def _make(self, request: requests.Profile | requests.Dump, folder: Path) -> Recording:
        # torch, which is for the script to import
        from adaptor.diagnostics.profiler import Profiler
        from adaptor.diagnostics.tensor_dump import TensorDump

        if isinstance(request, requests.Profile):
            return Profiler(request, self._rank, folder, self._writer, self._scratch)
        return TensorDump(request, self._rank, folder, self._writer, self._models)

    def _each(self, act: Callable[[Recording], None]) -> None:
        for variable, recording in list(self._running.items()):
            with self._guard(variable):
                act(recording)

    @contextlib.contextmanager
    def _guard(self, variable: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            failed = self._running.pop(variable, None)
            output.tell(f"[ttp] {variable}: rank {self._rank} records no more: {text.describe(error)}")
            if failed is not None:
                with contextlib.suppress(Exception):
                    failed.close()
