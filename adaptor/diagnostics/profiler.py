"""TTP_PROFILE: a trace of some steps by torch.profiler, or by torch_npu's profiler on an NPU."""

from __future__ import annotations

import contextlib
import inspect
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Protocol

import torch

from adaptor import output, text
from adaptor.diagnostics.requests import Profile


class _Trace(Protocol):
    """A profiler that records from `start` to `stop`."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Profiler:
    """Records the steps of a request on this rank.

    The trace is made in a local temporary folder first, because profilers write while they hold the
    interpreter; a thread then copies the trace to the log folder, which may hang.
    """

    def __init__(
        self, request: Profile, rank: int, folder: Path, writer: output.Writer, scratch: Path | None
    ) -> None:
        self._request, self._rank, self._folder, self._writer = request, rank, folder, writer
        self._scratch = scratch
        self._place: Path | None = None
        self._trace: _Trace | None = None
        self._from = self._to = 0
        self._has_recorded = False

    def begin_step(self, step: int) -> None:
        steps = self._request.steps
        if self._trace is not None:
            if step in steps:
                return
            self._stop()  # a step was left, and the loop has continued elsewhere
        if step in steps:
            self._start(step)

    def before_update(self) -> None:
        return

    def end_step(self, step: int) -> None:
        self._to = step
        if self._trace is not None and step >= self._request.steps.last:
            self._stop()

    def close(self) -> None:
        if self._trace is not None:
            self._stop()
        elif not self._has_recorded:
            output.tell(
                f"[ttp] TTP_PROFILE: rank {self._rank} has trained none of the steps {self._request.steps},"
                " so nothing is recorded"
            )
        self._has_recorded = True

    def _start(self, step: int) -> None:
        if torch.autograd._profiler_enabled():  # a second profiler would end the first, without an error
            raise RuntimeError("another profiler records this process")
        is_there = self._scratch is not None and self._scratch.is_dir()  # the folder may have been cleaned up
        self._place = Path(tempfile.mkdtemp(prefix="profile-", dir=self._scratch if is_there else None))
        self._has_recorded = True
        self._from = step
        try:
            trace = self._make_trace(self._place)
            trace.start()
        except Exception:
            shutil.rmtree(self._place, ignore_errors=True)
            raise
        self._trace = trace

    def _make_trace(self, place: Path) -> _Trace:
        npu = sys.modules.get("torch_npu")
        if npu is not None and hasattr(npu, "profiler") and torch.npu.is_available():  # type: ignore[attr-defined]
            handler = npu.profiler.tensorboard_trace_handler
            # An analysis here would delay the other ranks in the next step.
            has_analyse_flag = "analyse_flag" in inspect.signature(handler).parameters
            ready = handler(str(place), **({"analyse_flag": False} if has_analyse_flag else {}))
            trace: _Trace = npu.profiler.profile(on_trace_ready=ready)
            return trace
        return torch.profiler.profile(
            on_trace_ready=lambda profile: profile.export_chrome_trace(f"{place}/trace.json")
        )

    def _stop(self) -> None:
        trace, self._trace = self._trace, None
        place, self._place = self._place, None
        assert trace is not None
        assert place is not None
        try:
            trace.stop()
        except Exception:
            shutil.rmtree(place, ignore_errors=True)
            raise
        name = f"profile-rank{self._rank}-steps{self._from}-{self._to}"
        self._writer.submit(lambda: self._move(place, name))

    def _move(self, place: Path, name: str) -> None:
        try:
            target = self._folder / name
            target.mkdir(parents=True, exist_ok=True)
            shutil.copytree(place, target, dirs_exist_ok=True)
            output.tell(f"[ttp] TTP_PROFILE: the trace of rank {self._rank} is in {target}")
        except (OSError, shutil.Error) as error:
            output.tell(f"[ttp] TTP_PROFILE: the trace of rank {self._rank} is lost: {text.describe(error)}")
        finally:
            with contextlib.suppress(OSError):
                shutil.rmtree(place)
