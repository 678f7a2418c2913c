"""Writes the verdict of an incident, and what is said of one that was recovered online; pure."""

from __future__ import annotations

from collections.abc import Mapping

from adaptor.controller.failures import Cause, Failures
from adaptor.controller.incident import Incident
from adaptor.controller.membership import Membership
from adaptor.controller.outcome import Outcome
from adaptor.protocol.messages import BoardRecord, Fault, Phase, Recovered, Verdict


def verdict_of(incident: Incident, failures: Failures, membership: Membership) -> Verdict:
    """The verdict on `incident`, which has an outcome."""
    outcome = incident.state.outcome
    assert outcome is not None
    cause = failures.first(incident.state.silent)
    if outcome.kind == "lost" and cause.rank in failures.ended and not failures.hang_s:
        # Others have ended well before, and their states with them; but who hangs is in the middle.
        outcome = Outcome("nothing", -1, "the training was over")
    match outcome.kind:
        case "saved":
            kept = outcome.reason or "no finished step is lost"
            remarks = [incident.writing.doubts.words, *incident.target.remarks]
            line = "; ".join([f"step {outcome.step} is saved, {kept}", *filter(None, remarks)])
        case "nothing":
            unprotected = next(iter(membership.unprotected.values()), "")
            why = f"the job was not protected: {unprotected}" if unprotected else outcome.reason
            line = f"nothing to save: {why}"
        case _:
            line = f"the state cannot be saved: {outcome.reason}"
            line += f"; {membership.advice}" if outcome.unheld else ""
    if incident.regrouping.why_not and not failures.asked:
        line += f"; not recovered online: {incident.regrouping.why_not}"
    mistake = cause.mistake and outcome.kind == "nothing"
    newest = incident.freeze_state.newest_told if outcome.kind == "lost" else outcome.step
    return Verdict(
        incident=incident.number,
        outcome=outcome.kind,
        step=outcome.step,
        line=f"{cause.words}; {line}",
        cause_rank=cause.rank,
        exit_code=cause.exit_code,
        save=membership.save,
        leaves=tuple(sorted(failures.leaving | ({0} & failures.lost.keys()))),
        lost=bool(failures.lost),
        fault=_fault(cause, failures, membership, incident.state.boards),
        newest=newest,
        stop="another start would fail in the same way" if mistake else "",
    )


def recovered_of(incident: Incident, failures: Failures, membership: Membership) -> Recovered:
    """Return the message about `incident`, which was recovered online."""
    assert incident.state.outcome is not None
    cause, step = failures.first(incident.state.silent), incident.state.outcome.step
    newcomers = incident.regrouping.newcomers.by_rank
    pids = " and ".join(str(newcomer.pid) for newcomer in newcomers.values())
    seconds = incident.state.now - incident.state.opened_at
    words = [
        f"replaced by pid {pids}" if pids else "nobody is replaced",
        f"training goes on with step {step + 1}",
        incident.freeze_state.further(step) or "0 steps lost",
        f"{seconds:.1f} s",
    ]
    unsaved = incident.regrouping.unsaved
    remark = f"; step {step} could not be saved meanwhile: {unsaved}" if unsaved else ""
    return Recovered(
        incident=incident.number,
        step=step,
        line=f"{cause.words}; {', '.join(words)}{remark}",
        fault=_fault(cause, failures, membership, incident.state.boards),
        replaced=tuple(newcomers),
        retried=tuple(rank for rank in failures.raised if rank not in newcomers),
        seconds=seconds,
    )


def _fault(
    cause: Cause, failures: Failures, membership: Membership, frozen: Mapping[int, BoardRecord]
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
    host = membership.hosts.get(membership.node_of.get(rank, -1), "")
    return Fault(
        cause.key,
        finished,
        cause.ranks or (rank,),
        membership.pids.get(rank, 0),
        host,
        cause.kind,
        cause.status,
    )
