"""Writes the verdict of an incident with the exit code of `ttprun`, or the line of an online
recovery, and orders workers to exit; pure.

`Recurrence` counts faults that come again without progress, so that another start would only meet them again.
Every agent keeps the verdicts of its job, and hands the verdicts to the controller in its process. The
verdict says that the job is not started again, so all agents decide alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from adaptor.controller.failures import Failures, FirstCause, ranks_in_words
from adaptor.controller.freeze import FINISHED
from adaptor.controller.incident import Incident
from adaptor.controller.incident_state import Orders, Stage
from adaptor.controller.membership import Membership
from adaptor.protocol.messages import (
    Addressed,
    BoardRecord,
    Exit,
    Fault,
    Phase,
    Proceed,
    Raised,
    Recovered,
    ScriptStage,
    Verdict,
)

REFUSED_EXIT_CODE = 2
# A longer save gets a line before its end; most take less.
_LONG_SAVE_S = 2.0


def verdict_of(incident: Incident, failures: Failures, membership: Membership) -> Verdict:
    """Return the verdict on `incident`, which has an outcome."""
    outcome = incident.state.outcome
    assert outcome is not None
    cause = failures.first(incident.state.silent)
    ended_late = cause.rank in failures.ended_scripts and failures.ended_early is None
    if outcome.kind == "lost" and ended_late and not failures.hang_s:
        # The other ranks have ended well before, and their states with them; but a rank that hangs is in the
        # middle.
        outcome = FINISHED
    match outcome.kind:
        case "saved":
            kept = outcome.reason or "no finished step is lost"
            remarks = [incident.state.writing.doubts.words, *incident.state.target.remarks]
            line = "; ".join([f"step {outcome.step} is saved, {kept}", *filter(None, remarks)])
        case "nothing":
            unprotected = next(iter(membership.unprotected.values()), "")
            reason = f"the job was not protected: {unprotected}" if unprotected else outcome.reason
            line = f"nothing to save: {reason}"
        case _:
            line = f"the state cannot be saved: {outcome.reason}"
            line += f"; {membership.advice}" if outcome.unheld else ""
    if cause.kind == "corruption" and outcome.kind == "lost":
        line += "; an older checkpoint is loaded"
    if incident.regrouping.why_not and not failures.asked:
        line += f"; not recovered online: {incident.regrouping.why_not}"
    stop, exit_code, cut_off = "", cause.exit_code, []
    if cause.mistake:
        stop = "another start would fail in the same way"
    elif failures.corruption is not None and failures.corruption.stops:
        stop = "TTP_CORRUPTION is stop"
    elif _is_trained(incident, failures, cause, outcome.kind):
        stop = "nothing is left to train"
        is_finished = incident.freeze_state.stage == ScriptStage.FINISHED
        cut_off = sorted(incident.state.nodes.keys() - {cause.rank}) if is_finished else []
        if cut_off:
            line += f"; {_cut_off_words(cut_off, incident, failures)}"
        elif cause.kind in ("signal", "exit") and not failures.lost:
            exit_code = max(0, cause.status or 0)
    newest = incident.freeze_state.newest_told if outcome.kind == "lost" else outcome.step
    lost = failures.lost.keys() & membership.lost
    return Verdict(
        incident=incident.number,
        outcome=outcome.kind,
        step=outcome.step,
        line=f"{cause.words}; {line}",
        cause_rank=cause.rank,
        exit_code=exit_code,
        save_folder=membership.save_folder,
        leaves=tuple(sorted(failures.leaving | ({0} & lost))),
        lost=tuple(sorted(lost)),
        fault=_fault(cause, failures, membership, incident.state.boards),
        newest=newest,
        stop=stop,
        unprotected=outcome.kind == "nothing" and bool(membership.unprotected),
        agreed=None if failures.corruption is None else failures.corruption.agreed,
    )


def _is_trained(incident: Incident, failures: Failures, cause: FirstCause, outcome: str) -> bool:
    """Return True if all ranks have trained to the end, so that another start would train nothing.

    After a training loop of one's own the script still evaluates and saves: only an exception that another
    start cannot mend ends the job there.
    """
    if outcome == "lost":
        return False
    if incident.freeze_state.stage == ScriptStage.TRAINED:
        return cause.kind == "exception" and failures.raised[cause.rank].origin.lasting
    is_finished = incident.freeze_state.stage == ScriptStage.FINISHED
    return is_finished and cause.kind in ("exception", "signal", "exit")


def _cut_off_words(ranks: Sequence[int], incident: Incident, failures: Failures) -> str:
    """Return the words about live ranks whose scripts had not come to their end."""
    running = [rank for rank in ranks if rank not in failures.raised]
    raised = [rank for rank in ranks if rank in failures.raised]
    seconds, limit = incident.state.now - incident.state.opened_at, incident.state.timeout_s
    elapsed = f"{seconds:.0f} s later{' (TTP_OT)' if seconds >= limit else ''}"
    phrases = [
        f"{ranks_in_words(running, 'was', 'were')} cut off {elapsed}" if running else "",
        f"{ranks_in_words(raised, 'has', 'have')} raised, too" if raised else "",
    ]
    return " and ".join(filter(None, phrases))


def open_words(incident: Incident, failures: Failures) -> str:
    """Return the progress of an open incident in words; "" without news.

    The words name the step that is saved, once new processes are awaited, and before the end of a long save;
    or the ranks whose scripts are awaited.
    """
    state, step, regrouping = incident.state, incident.step, incident.regrouping
    if state.stage is Stage.ENDING_SCRIPTS and failures.is_known and (running := incident.running_scripts):
        ranks = ranks_in_words(running, "has", "have")
        cause = failures.first(state.silent).words
        return f"{cause}; the training was over; {ranks} up to {state.timeout_s:g} s to end (TTP_OT)"
    if step < 0 or state.outcome is not None or not failures.is_known:
        return ""
    cause = failures.first(state.silent).words
    if not regrouping.has_begun:
        takes_long = state.now - state.opened_at >= _LONG_SAVE_S
        return f"{cause}; step {step} is being saved" if takes_long else ""
    count = len(regrouping.newcomers.by_rank)
    if not count:
        return ""
    seconds = regrouping.begun_at - state.opened_at
    took = f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
    unsaved = regrouping.unsaved
    saved = f"step {step} could not be saved: {unsaved}" if unsaved else f"step {step} is saved ({took})"
    if regrouping.from_copies:
        saved = f"all ranks go back to step {step}, from copies in host memory"
    start = "a new process is started" if count == 1 else f"{count} new processes are started"
    if regrouping.newcomers.unplaced:
        start = "a spare node is awaited"
    return f"{cause}; {saved}; {start}"


def recovered_of(incident: Incident, failures: Failures, membership: Membership) -> Recovered:
    """Return the message about `incident`, which was recovered online."""
    assert incident.state.outcome is not None
    cause, step = failures.first(incident.state.silent), incident.state.outcome.step
    newcomers, spares = incident.regrouping.newcomers.by_rank, incident.regrouping.spare_nodes
    away = {rank for node in spares for rank in membership.ranks_of(node)}
    pids = " and ".join(str(newcomer.pid) for rank, newcomer in newcomers.items() if rank not in away)
    hosts = [f"the spare node {membership.hosts[node]} has the place of node {node}" for node in spares]
    seconds = incident.state.now - incident.state.opened_at
    repetition, made_again = incident.freeze_state.further(step), 0
    if repetition and cause.kind == "corruption":
        repetition = "later steps are made again"
    if incident.regrouping.from_copies:
        made_again = max(0, incident.freeze_state.newest_told - step)
        count = "1 finished step is" if made_again == 1 else f"{made_again} finished steps are"
        repetition = f"from copies in host memory; {count} made again"
    parts_of_line = [
        *([f"replaced by pid {pids}"] if pids else []),
        *hosts,
        *([] if newcomers else ["nobody is replaced"]),
        f"training goes on after step {step}",
        repetition or "0 steps lost",
        f"{seconds:.1f} s after the fault was noticed",
    ]
    unsaved = incident.regrouping.unsaved
    remark = f"; step {step} could not be saved meanwhile: {unsaved}" if unsaved else ""
    return Recovered(
        incident=incident.number,
        step=step,
        line=f"{cause.words}; {', '.join(parts_of_line)}{remark}",
        fault=_fault(cause, failures, membership, incident.state.boards),
        replaced=tuple(newcomers),
        retried=tuple(rank for rank in failures.raised if rank not in newcomers),
        seconds=seconds,
        made_again=made_again,
    )


def _fault(
    cause: FirstCause, failures: Failures, membership: Membership, frozen: Mapping[int, BoardRecord]
) -> Fault:
    rank = cause.rank
    if rank < 0:
        return Fault(
            cause.key,
            pid=membership.agent_pids.get(cause.node, 0),
            host=membership.hosts.get(cause.node, ""),
            kind=cause.kind,
        )
    raised, board = failures.raised.get(rank), membership.boards.get(rank, frozen.get(rank))
    finished = raised.origin.finished if raised is not None else None
    if board is not None and board.phase != Phase.STARTING:
        finished = board.finished
    node = membership.node_of.get(rank, -1)
    host = failures.lost_hosts.get(node) or membership.hosts.get(node, "")
    return Fault(
        cause.key,
        finished,
        cause.ranks or (rank,),
        membership.pids.get(rank, 0),
        host,
        cause.kind,
        cause.status,
        cause.why,
        lasting=_is_lasting_before_training(raised) and cause.kind == "exception",
        on_all_ranks=_is_raised_on_all_ranks(failures, membership),
    )


def _is_lasting_before_training(raised: Raised | None) -> bool:
    return raised is not None and raised.origin.lasting and raised.origin.finished < 0


def _is_raised_on_all_ranks(failures: Failures, membership: Membership) -> bool:
    """Return True if every rank has raised the same exception, at the same place."""
    origins = {(raised.origin.kind, raised.origin.where) for raised in failures.raised.values()}
    return len(failures.raised) == membership.world_size and len(origins) == 1


def refused(rank: int, reason: str) -> Verdict:
    """Return the verdict if `rank` refuses the job."""
    return Verdict(
        incident=0,
        outcome="refused",
        step=-1,
        line=reason,
        cause_rank=rank,
        exit_code=REFUSED_EXIT_CODE,
        save_folder="",
    )


def given_up(number: int, reason: str) -> Verdict:
    """Return the verdict on incident `number` if the controller itself has failed."""
    return Verdict(
        incident=number,
        outcome="lost",
        step=-1,
        line=f"the controller failed: {reason}",
        cause_rank=-1,
        exit_code=1,
        save_folder="",
        fault=Fault(kind="error"),
    )


def shown_rank(verdict: Verdict, failures: Failures) -> int:
    """Return the rank to blame, else the first that raised before a request to end, or -1."""
    if verdict.cause_rank >= 0 or failures.asked is not None:
        return verdict.cause_rank
    return next(iter(failures.raised), -1)


def end_all(verdict: Verdict, number: int, shown: int, membership: Membership) -> Orders:
    """Return the orders that bring `verdict` to all agents, and let all workers exit.

    `number`: the incident known to the workers; `shown`: the rank with the shown exception, -1: none.
    """
    # First to the agents: no worker exits before its agent knows the verdict, whatever dies now.
    verdicts: Orders = [(node, verdict) for node in sorted(membership.agents | membership.late)]
    leave, blamed = Exit(number), Exit(number, blamed=True)
    return verdicts + [
        (node, Addressed(rank, blamed if rank == shown else leave))
        for rank, node in membership.node_of.items()
        if rank not in membership.dead
    ]


def go_on(recovered: Recovered, membership: Membership) -> Orders:
    """Return the orders by which all agents and ranks learn that the incident is over."""
    # First to the agents: a next controller must not hear of the recovered failures.
    orders: Orders = [(node, recovered) for node in sorted(membership.agents)]
    proceed = Proceed(recovered.incident, recovered.step, recovered.line)
    return orders + [(node, Addressed(rank, proceed)) for rank, node in membership.node_of.items()]


# A lasting exception (`messages.Origin`) ends the job after so many times, if no start has trained.
_MOST_BEFORE_TRAINING = 2
# The exit code of a job without progress. sysexits.h ends at 78, and signals begin at 128.
EXIT_NO_PROGRESS = 79


class Recurrence:
    """The faults of one job, from start to start.

    Args:
        limit: the number of times that a fault may come at the same step without a newer checkpoint, in turn
            with other faults or alone (TTP_NO_PROGRESS); 0: as often as restarts are left.
    """

    def __init__(self, limit: int = 0) -> None:
        self._limit = limit
        # Faults with their steps, since `_reached` was saved.
        self._counts: Counter[tuple[str, int]] = Counter()
        self._is_first = True  # no verdict has been given
        self._has_trained = False  # in any start
        self._reached = -1  # the newest step saved

    def note(self, verdict: Verdict) -> None:
        """Count a verdict that has been given."""
        if verdict.step > self._reached:
            self._reached = verdict.step
            self._counts.clear()
        position = _position(verdict)
        self._counts[position] += 1
        self._is_first = False
        self._has_trained = self._has_trained or max(position[1], verdict.newest) >= 0

    def judge(self, verdict: Verdict) -> Verdict:
        """Return the verdict, with the reason why the job ends if the fault came too often."""
        times, limit = self._times(verdict), self._limit
        if not limit or verdict.stop:
            return verdict
        if verdict.fault.lasting and not self._has_trained:
            if verdict.fault.on_all_ranks and self._is_first:
                stop = f"every rank has raised {verdict.fault.key} {verdict.fault.when}"
                return msgspec.structs.replace(verdict, stop=stop)
            limit = min(limit, _MOST_BEFORE_TRAINING)
        if times < limit:
            return verdict
        often = "came once" if times == 1 else f"came {times} times"
        parts_of_line = [verdict.fault.key, often, verdict.fault.when, "without a newer checkpoint"]
        stop = f"{' '.join(filter(None, parts_of_line))} (TTP_NO_PROGRESS)"
        return msgspec.structs.replace(verdict, stop=stop, exit_code=EXIT_NO_PROGRESS)

    def _times(self, verdict: Verdict) -> int:
        """Return how often the fault has come at its step without a newer checkpoint, this time included."""
        if not verdict.fault.key:
            return 0
        return 1 if verdict.step > self._reached else self._counts[_position(verdict)] + 1


def _position(verdict: Verdict) -> tuple[str, int]:
    """Return the failed part and its step; the step of the job if no rank is known to have failed."""
    finished = verdict.fault.finished
    return verdict.fault.key, verdict.newest if finished is None else finished
