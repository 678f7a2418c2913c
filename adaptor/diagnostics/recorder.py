"""Tells the recordings (`recordings.py`) the begin and end of steps, and keeps their failures from training.

The session reports the begin and end of steps. A failure here is one line, and ends only the recording; a
thread writes the files, because its disk may hang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from adaptor import output, text
from adaptor.context import Context
from adaptor.diagnostics import requests
from adaptor.diagnostics.requests import RecordingSettings
from adaptor.errors import ConfigError
from adaptor.hooks import WorkerHooks
from adaptor.protocol.environment import Generation, Scratch, WorkerPlace

if TYPE_CHECKING:
    import torch

# The time for writing at the end of the script, enough for a working disk.
_END_S = 30.0
# Of Megatron-LM, MindSpeed and ModelLink.
_PROFILERS = ("profile", "use_pytorch_profiler")


class Recording(Protocol):
    """A recording; it is called on the main thread, and may raise any exception."""

    def begin_step(self, step: int) -> None: ...

    def before_update(self) -> None:
        """Gradients are complete; the update is next, or is skipped."""

    def end_step(self, step: int) -> None:
        """The step has ended, or the next step begins."""

    def close(self) -> None:
        """No further step will come; a second call does nothing."""


class Recorder(WorkerHooks):
    """The recordings of this process, a part of its context; without a request it does nothing."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._own = context.settings.of(RecordingSettings)
        self._context = context
        self._rank = -1  # known in `watch`: the process may be a spare, which has no rank yet
        self._log_path = Path(self.settings.log_path).resolve()
        self._models: Sequence[torch.nn.Module] = ()
        self._running: dict[str, Recording] = {}
        self._step = -1
        self._has_begun = False  # a step of the present recordings
        self._writer = output.Writer("ttp-recorder")

    def checks(self, args: Any, *, begins: bool) -> Iterator[Callable[[], None]]:
        if not begins:
            yield lambda: self.require_other_loop(args.world_size, args)

    def require_other_loop(self, world_size: int, args: Any = None) -> None:
        """Refuse TTP_PROFILE beside a profiler of the framework, and ranks outside of the job."""
        for name in _PROFILERS if self._own.profile is not None else ():
            if getattr(args, name, False):
                raise ConfigError(
                    f"--{name.replace('_', '-')} is given, and TTP_PROFILE is set: two profilers cannot"
                    " record the same process; leave out one of them"
                )
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
        self._running.clear()  # without a step nothing is open
        self._has_begun = False
        self._models = models
        self._rank = self._context.part(WorkerPlace).rank
        generation = self._context.part(Generation).name
        folder = self._log_path / "-".join(filter(None, ("record", generation[:8])))
        for variable, request in self._requests():
            if request is None or self._rank not in request.ranks:
                continue
            with self._guard(variable):
                self._running[variable] = self._make(request, folder)

    def begin_step(self, step: int) -> None:
        """Note the begin of `step`; an earlier step has ended, even without `end_step`."""
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
        """Note the end of the step; without a step do nothing."""
        if self._running and self._step >= 0:
            step, self._step = self._step, -1
            self._each(lambda recording: recording.end_step(step))

    def close(self) -> None:
        """Note that no further step comes in this process; wait for a bounded time until all files are
        written.
        """
        if not self._running:
            return
        self.end_step()
        self._each(lambda recording: recording.close())
        self._running.clear()
        self._writer.drain(_END_S)

    def _requests(self) -> tuple[tuple[str, requests.Profile | requests.DumpRequest | None], ...]:
        return (("TTP_PROFILE", self._own.profile), ("TTP_DUMP", self._own.dump))

    def _make(self, request: requests.Profile | requests.DumpRequest, folder: Path) -> Recording:
        # Imported here: the script imports torch.
        from adaptor.diagnostics.recordings import Profiler, TensorDump

        if isinstance(request, requests.Profile):
            return Profiler(request, self._rank, folder, self._writer, self._context.part(Scratch).path)
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
