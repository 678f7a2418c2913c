"""The place of a training loop in its script: tells whether a begun step has been left by `break`.

The end of a step without an update, begun by `begin_step`, is not reported. The calls that led to
`begin_step` and to the updates of earlier steps show the function of the loop and the lines of a step. A main
thread outside of these lines has left the step.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import NamedTuple

from adaptor.worker import thread_frames


class _Call(NamedTuple):
    """A call on the way to where a thread stands; the frame by its number, for it must not be kept alive."""

    frame: int
    code: CodeType
    line: int


class _StepLines(NamedTuple):
    """The lines of a step in the function `code`, which is the call number `depth` from the outermost."""

    depth: int
    code: CodeType
    first: int
    last: int


class LoopPosition:
    """Told by the thread that trains; any other may ask."""

    def __init__(self) -> None:
        self._begun: list[_Call] = []
        self._body: _StepLines | None = None

    def begin(self) -> None:
        """A step begins."""
        self._begun = _calls(sys._getframe(1))

    def update(self) -> None:
        """Its optimizer makes the update."""
        shared = [
            (begun_call, present_call)
            for begun_call, present_call in zip(self._begun, _calls(sys._getframe(1)), strict=False)
            if (begun_call.frame, begun_call.code) == (present_call.frame, present_call.code)
        ]
        if not shared:
            return
        begun_call, present_call = shared[-1]
        body = _StepLines(len(shared) - 1, begun_call.code, begun_call.line, present_call.line)
        known_body = self._body
        if known_body is not None and known_body[:2] == body[:2]:
            body = body._replace(
                first=min(known_body.first, body.first), last=max(known_body.last, body.last)
            )
        self._body = body

    def was_left(self, thread: int) -> bool:
        """Return whether `thread` has left the step that it has begun; False if unknown."""
        body, begun_calls = self._body, self._begun
        if body is None or len(begun_calls) <= body.depth or begun_calls[body.depth].code is not body.code:
            return False
        calls = _calls(thread_frames.of(thread))
        if len(calls) <= body.depth or calls[body.depth].frame != begun_calls[body.depth].frame:
            return True  # the function has returned
        return body.first <= body.last and not body.first <= calls[body.depth].line <= body.last


def _calls(frame: FrameType | None) -> list[_Call]:
    """Return the calls that led to `frame`, the outermost first."""
    calls = []
    while frame is not None:
        calls.append(_Call(id(frame), frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return calls[::-1]
