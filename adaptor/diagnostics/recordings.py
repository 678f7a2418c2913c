"""Starts the profiler in the requested steps (TTP_PROFILE), and records values of tensors (TTP_DUMP).

Hooks exist only during the requested steps. Hooks read, and change nothing: no random number is drawn and no
node is added to the graph of autograd, so losses stay bit for bit the same. The profiler is torch's, or
torch_npu's on an NPU.
"""

from __future__ import annotations

import contextlib
import fnmatch
import inspect
import io
import json
import shutil
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from adaptor import output, text
from adaptor.diagnostics.requests import DumpRequest, Profile

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

_MIB = 1 << 20
Statistics: TypeAlias = "dict[str, float | int | None]"


class TensorDump:
    """Records the steps of a request on this rank.

    `dump-rank<n>.jsonl` has a line for each tensor, in the order of computation; with `tensors` a line names
    the file of its tensor.
    """

    def __init__(
        self,
        request: DumpRequest,
        rank: int,
        folder: Path,
        writer: output.Writer,
        models: Sequence[torch.nn.Module],
    ) -> None:
        self._request, self._rank, self._writer = request, rank, writer
        self._folder = folder
        self._lines = folder / f"dump-rank{rank}.jsonl"
        self._modules = [
            (name, module)
            for prefix, model in _chunks(models)
            for name, module in model.named_modules(prefix=prefix)
            if self._is_asked_for(name)
        ]
        self._parameters = [
            (name, parameter)
            for prefix, model in _chunks(models)
            for name, parameter in model.named_parameters(prefix=prefix)
            if parameter.requires_grad and self._is_asked_for(name)
        ]
        self._hooks: list[RemovableHandle] = []
        self._calls = Counter[str]()
        self._step = 0
        self._misses_gradients = False
        self._queue = deque[tuple[str, Path | None, torch.Tensor | None]]()
        self._size = self._count = 0  # bytes and tensors for the writer
        self._written = 0  # tensors
        self._full = self._has_reported_nan = self._has_reported_failure = False
        self._has_recorded = self._closed = False
        if not self._modules and not self._parameters:
            patterns = ", ".join(request.modules)
            output.tell(f"[ttp] TTP_DUMP: rank {rank} has no module and no parameter like {patterns}")

    def begin_step(self, step: int) -> None:
        self._remove_hooks()
        if step not in self._request.steps:
            return
        self._has_recorded = True
        if self._full:
            return
        self._step, self._misses_gradients, self._has_reported_nan = step, True, False
        self._calls.clear()
        for name, module in self._modules:
            self._hooks.append(module.register_forward_hook(partial(self._after_forward, name)))

    def before_update(self) -> None:
        if not self._misses_gradients:
            return
        self._misses_gradients = False
        for name, parameter in self._parameters:
            gradient = getattr(parameter, "main_grad", None)
            gradient = parameter.grad if gradient is None else gradient
            if isinstance(gradient, torch.Tensor):
                self._guarded(self._write, "gradient", name, "", 0, gradient)

    def end_step(self, step: int) -> None:
        self._misses_gradients = False
        self._remove_hooks()

    def close(self) -> None:
        self._remove_hooks()
        if self._closed:
            return
        self._closed = True
        if self._has_recorded:
            self._writer.submit(self._tell_where)  # after all that is still to be written
        else:
            output.tell(
                f"[ttp] TTP_DUMP: rank {self._rank} has trained none of the steps {self._request.steps}, so"
                " nothing is recorded"
            )

    def _tell_where(self) -> None:
        if self._written:
            output.tell(f"[ttp] TTP_DUMP: {self._written} tensors of rank {self._rank} are in {self._lines}")

    def _is_asked_for(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._request.modules)

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _after_forward(
        self, name: str, module: torch.nn.Module, module_output: object, returned: object
    ) -> None:
        """Look at a module's output; a forward hook, whose result None leaves the output unchanged."""
        self._guarded(self._look_at, name, returned)

    def _look_at(self, name: str, returned: object) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # a graph in the making may read nothing
        self._calls[name] += 1
        call = self._calls[name]
        for place, tensor in _tensors(returned, "output"):
            self._write("forward", name, place, call, tensor)
            # Not a backward hook of the module, which would add a node to the graph. A tensor without a
            # function is a parameter, whose gradient has its own lines.
            if tensor.grad_fn is not None:
                hook = partial(self._after_backward, name, place, call)
                self._hooks.append(tensor.register_hook(hook))  # type: ignore[no-untyped-call]

    def _after_backward(self, name: str, place: str, call: int, gradient: torch.Tensor) -> None:
        self._guarded(self._write, "backward", name, place, call, gradient)

    def _guarded(self, act: Callable[..., None], *arguments: object) -> None:
        """Call inside of the framework's passes: an error is reported once, and not raised."""
        try:
            with torch.no_grad():
                act(*arguments)
        except Exception as error:
            if not self._has_reported_failure:
                self._has_reported_failure = True
                output.tell(f"[ttp] TTP_DUMP: rank {self._rank} leaves out tensors: {text.describe(error)}")

    def _write(self, kind: str, name: str, place: str, call: int, tensor: torch.Tensor) -> None:
        if self._full:
            return
        line: dict[str, object] = {"step": self._step, "kind": kind, "name": name}
        if kind != "gradient":
            line |= {"call": call, "tensor": place}
        line |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        if self._request.stats:
            statistics_found = statistics(tensor)
            line |= {key: statistics_found[key] for key in self._request.stats}
            self._look_for_nan(line, statistics_found)
            self._submit(line, None)
        else:
            self._submit(line, tensor.detach().to("cpu", copy=True))

    def _submit(self, line: dict[str, object], tensor: torch.Tensor | None) -> None:
        self._count += 1
        path = None
        if tensor is not None:
            path = self._folder / f"dump-rank{self._rank}-step{self._step}" / f"{self._count:06d}.pt"
            line["file"] = f"{path.parent.name}/{path.name}"
        written = json.dumps(line, allow_nan=False) + "\n"
        size = len(written) + (tensor.nbytes if tensor is not None else 0)
        if self._size + size > self._request.limit * _MIB:
            self._full = True
            output.tell(
                f"[ttp] TTP_DUMP: rank {self._rank} has written {self._request.limit} MiB, its limit, in step"
                f" {self._step}, and writes no more"
            )
            return
        self._size += size
        self._queue.append((written, path, tensor))
        # If the queue was not empty, its writing is under way.
        if len(self._queue) == 1 and not self._writer.submit(self._append):
            self._give_up("no thread can be started that writes")

    def _append(self) -> None:
        """Write all queued lines; in the writer's thread."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with self._lines.open("a", encoding="utf-8") as file:
                while self._queue:
                    line, path, tensor = self._queue[0]
                    if path is not None and tensor is not None:
                        path.parent.mkdir(parents=True, exist_ok=True)
                        buffer = io.BytesIO()
                        torch.save(tensor, buffer)
                        path.write_bytes(buffer.getbuffer())
                    file.write(line)
                    self._queue.popleft()
                    self._written += 1
        except Exception as error:
            self._give_up(text.describe(error))

    def _give_up(self, reason: str) -> None:
        self._queue.clear()
        if not self._full:
            self._full = True
            output.tell(f"[ttp] TTP_DUMP: rank {self._rank} writes no more: {reason}")

    def _look_for_nan(self, line: dict[str, object], statistics_found: Statistics) -> None:
        if self._has_reported_nan or not (statistics_found["nan"] or statistics_found["inf"]):
            return
        self._has_reported_nan = True
        output.tell(
            f"[ttp] TTP_DUMP: step {self._step}, rank {self._rank}: the first tensor that is not finite is of"
            f" {line['kind']}, {line['name'] or 'the whole model'} ({statistics_found['nan']} NaN, "
            f"{statistics_found['inf']} inf)"
        )


def statistics(tensor: torch.Tensor) -> Statistics:
    """Return the statistics of a tensor (`requests.STATISTICS`).

    nan and inf are counts; min, max, mean and norm (the 2-norm) are of the finite elements, in float32, None
    without finite elements.
    """
    if not tensor.numel():
        return {"min": None, "max": None, "mean": None, "norm": None, "nan": 0, "inf": 0}
    values = tensor.detach().float().flatten()
    finite = torch.isfinite(values)
    zeros = torch.where(finite, values, 0.0)
    nan, inf = torch.stack([torch.isnan(values).sum(), torch.isinf(values).sum()]).tolist()
    low = torch.where(finite, values, torch.inf).min()
    high = torch.where(finite, values, -torch.inf).max()
    parts = torch.stack([low, high, zeros.sum(), torch.linalg.vector_norm(zeros)])
    read = parts.tolist()
    finite_count = tensor.numel() - nan - inf
    statistics_found: Statistics = dict.fromkeys(("min", "max", "mean", "norm"))
    if finite_count:
        read[2] /= finite_count
        statistics_found |= {
            key: value if _is_finite(value) else None
            for key, value in zip(statistics_found, read, strict=True)
        }
    return {**statistics_found, "nan": nan, "inf": inf}


def _is_finite(number: float) -> bool:
    return number - number == 0


def _chunks(models: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    return [("" if len(models) == 1 else f"model{number}", model) for number, model in enumerate(models)]


def _tensors(value: object, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in a module's output, with their places: `output.0`."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield place, value
    elif isinstance(value, (list, tuple)):
        for number, element in enumerate(value):
            yield from _tensors(element, f"{place}.{number}")
    elif isinstance(value, dict):
        for key, element in value.items():
            yield from _tensors(element, f"{place}.{key}")


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
