"""Tells a hang from a slow step, from the boards of a node's workers; pure, the time is an argument.

Every agent runs `HangDetector` for its node; the controller keeps the reports of all nodes (`StalledNodes`).

A job hangs when every node reports a stall, and no rank can be at something slow: start-up, compilation,
evaluation, a save. A rank between two steps may be at something slow, unless another rank is still in the
middle of a step that the rank has finished: then the rank waits. A marked phase between two steps
(`Session.phase`) has a limit of its own, once a phase of its kind has ended: beyond the limit the rank counts
as in the middle of its next step. A rank at the end of its script does nothing any more. In the first steps
of a process kernels are compiled and data is read for the first time, and no duration is known: first steps
may take as long as any rank may be waited for.

Invariant: a stall is a hang only if some rank is in the middle of a step, or in a phase for too long, and
every other rank is in a step as well, waits for a rank in a step, has ended, or has been waited for longer
than torch's own default time-outs allow. A rank in the first phase of its kind, whose duration is unknown, is
waited for without limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

import msgspec

from adaptor.protocol.messages import BoardRecord, NodeResumed, NodeStalled, Phase

# A step is a hang when its duration is this multiple of the slowest recent step.
FACTOR = 3.0
# The same for a phase between two steps, with the slowest of its kind or the floor: a save takes much longer
# than usual when others use the same storage. With the default floor the limit is 10 minutes at least, after
# which NCCL's own watchdog would end the job.
PHASE_FACTOR = 5.0
# The limit of a step or phase is at most this multiple of the floor (TTP_HANG), unless the phase is the first
# of its kind: 30 minutes with the default floor, torch's own default time-out of a collective on gloo.
OVERLONG = 15.0
# An agent that has not looked for this time was stopped or starved itself, perhaps with its workers.
ABSENT_S = 10.0
# The limit of a step as a share of `BoardRecord.kernel_timeout`; the rest is for the
# answers of all ranks, and for the copies to the host.
KERNEL_TIMEOUT_SHARE = 0.75
# The report is repeated, for a successor of the controller, when the stall has lasted longer by this part:
# thousands of nodes of a job that evaluates for an hour must not report all the time.
AGAIN = 1 / 16


class HangDetector:
    """Watches the boards of a node; no time below `floor_s` (TTP_HANG) is a hang; 0: no hang."""

    def __init__(self, node: int, floor_s: float) -> None:
        self._node = node
        self._floor_s = floor_s
        self._seen: dict[int, tuple[int, ...]] = {}
        self._since = 0.0
        self._looked = float("-inf")
        self._said: NodeStalled | None = None

    def look(
        self, boards: Iterable[BoardRecord], time_now: float, *, traced: bool = False
    ) -> NodeStalled | NodeResumed | None:
        """Return the report for the controller, or None without news; `traced`: by a debugger or compiler."""
        stall = self._stall(list(boards), time_now, traced)
        reported_stall, self._said = self._said, stall
        if stall is None:
            return NodeResumed(self._node) if reported_stall is not None else None
        if (
            reported_stall is not None
            and _content(stall) == _content(reported_stall)
            and stall.seconds < reported_stall.seconds * (1 + AGAIN)
        ):
            self._said = reported_stall
            return None
        return stall

    def _stall(self, boards: list[BoardRecord], time_now: float, traced: bool) -> NodeStalled | None:
        positions = {board.rank: _position(board) for board in boards}
        if positions != self._seen or traced or time_now - self._looked > ABSENT_S:
            self._seen, self._since = positions, time_now
        self._looked = time_now
        going = [board for board in boards if board.phase != Phase.ENDED]
        if not self._floor_s or not all(map(_is_training, going)):
            return None
        seconds = time_now - self._since
        if seconds < max((self._step_may_take(board) for board in going), default=self._floor_s):
            return None
        inside: list[int] = []
        between: list[int] = []
        for board in going:
            step = board.inside if board.inside >= 0 else board.finished + 1  # the current step, or the next
            if self._may_take_its_time(board, seconds):
                between.append(step - 1)
            else:
                inside.append(step)
        # A rank in the first phase of its kind has no measure yet, and a restart would bring the rank there
        # again.
        overlong = seconds >= OVERLONG * self._floor_s and all(board.usual for board in going)
        return NodeStalled(self._node, seconds, min(inside, default=-1), min(between, default=-1), overlong)

    def _step_may_take(self, board: BoardRecord) -> float:
        """Return the seconds that a step may take; the first steps of a process get most."""
        factor = FACTOR * board.slowest
        floor_s = self._floor_s
        if board.kernel_timeout:
            floor_s = min(floor_s, KERNEL_TIMEOUT_SHARE * board.kernel_timeout)
        return max(floor_s, factor) if factor else OVERLONG * floor_s

    def _may_take_its_time(self, board: BoardRecord, seconds: float) -> bool:
        if board.usual < 0:  # in no phase
            return board.inside < 0
        return not board.usual or seconds < PHASE_FACTOR * max(self._floor_s, board.usual)


def hang(nodes: Iterable[NodeStalled]) -> bool:
    """Return True if the job hangs; `nodes`: the reports of all of its nodes."""
    nodes = list(nodes)
    inside = [stalled.inside for stalled in nodes if stalled.inside >= 0]
    between = [stalled.between for stalled in nodes if stalled.between >= 0]
    if not inside:
        return False
    return min(inside) <= min(between, default=min(inside)) or all(stalled.overlong for stalled in nodes)


class StalledNodes:
    """The reports of nodes whose workers all stand still."""

    def __init__(self) -> None:
        self._reports: dict[int, NodeStalled] = {}

    def take(self, report: NodeStalled) -> bool:
        """Return True if `report` is news: thousands of nodes may repeat a report while all evaluate."""
        earlier_report = self._reports.get(report.node)
        self._reports[report.node] = report
        return (
            earlier_report is None
            or msgspec.structs.replace(earlier_report, seconds=report.seconds) != report
        )

    def resume(self, node: int) -> None:
        """Note that something moves on `node` again."""
        self._reports.pop(node, None)

    def clear(self) -> None:
        """All ranks go on after an incident."""
        self._reports.clear()

    def hang_s(self, nodes: Set[int]) -> float:
        """Return the seconds without movement on all of `nodes`; 0 if the job does not hang."""
        if not nodes or not nodes <= self._reports.keys():
            return 0.0
        reports = [self._reports[node] for node in nodes]
        return min(report.seconds for report in reports) if hang(reports) else 0.0


def _content(stalled: NodeStalled) -> tuple[int, int, bool]:
    return stalled.inside, stalled.between, stalled.overlong


def _position(board: BoardRecord) -> tuple[int, ...]:
    return board.phase, board.finished, board.ahead, board.inside, board.progress, board.turns


def _is_training(board: BoardRecord) -> bool:
    return board.phase in (Phase.RUNNING, Phase.READY, Phase.UPDATING)
