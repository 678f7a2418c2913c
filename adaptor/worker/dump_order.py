"""Follows an order to dump: brings this rank to the step, and writes or gives its parts of the groups.

Invariant: every error becomes an answer (`WriteFailed`) and never ends this process; an attempt that has been
replaced by a newer attempt does not report its failure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from adaptor import text
from adaptor.protocol.messages import Dump, Endpoint, FromWorker, GroupOrder, WriteFailed, Written
from adaptor.protocol.state_provider import DumpRun, NotFiniteError
from adaptor.worker import abort_collectives
from adaptor.worker.session import Session

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupGloo

    from adaptor.worker.dump_store import DumpStore


def follow(
    order: Dump,
    rank: int,
    session: Session,
    *,
    store_port: int,
    is_current: Callable[[], bool],
    sockets: Callable[[], frozenset[int] | None],
    say: Callable[[FromWorker, str, str], None],
    note: Callable[[str, str], None],
) -> None:
    """Follow an order to dump; the call may take long.

    Args:
        store_port: of the framework's own store, whose connections are left alone.
        is_current: returns False once a newer order has come.
        sockets: returns the inodes of the connections that may be shut; None: all.
        say: queues a message for the agent, after the message's entry in the timeline of the incident: an
            event and a detail. Message and entry are sent together, because a process stopped between the two
            would seem to have sent both.
        note: adds to the timeline of the incident: an event and a detail.
    """
    assert session.trainee is not None
    group = order.groups[0]
    stores: list[DumpStore] = []
    try:
        is_behind = session.board.finished < order.step
        shut = abort_collectives.Waker(frozenset({store_port, order.store_port}))

        def wake() -> int:  # an online recovery may have begun: its connections are new ones
            return shut(sockets()) if is_current() else 0

        _bring_to(session, order, wake)
        past = session.from_local_copy(order.step)
        if is_behind or past:
            note("from-the-local-copy" if past else "through-the-door", f"step {order.step}")
        record = session.record_of(order.step)
        for group in order.groups:
            own_indices = {index for index, holder in enumerate(group.holders) if holder == rank}
            verifier = None if past else session.window.verifier
            if verifier is not None:
                verifier.require_unchanged(session.trainee, order.step, own_indices)
            remarks: list[str] = []
            run = DumpRun(
                rank=rank,
                folder=order.folder,
                attempt=order.attempt,
                connect=lambda ranks, group=group: _connect(order, group, rank, ranks, stores),  # type: ignore[misc]
                progress=session.board.advance,
                cancelled=lambda: not is_current(),
                as_is=group.group in order.as_is,
                in_place=order.in_place,
                remark=remarks.append,
                past=past,
                groups=order.groups,
                wake=wake,
            )
            files = session.trainee.dump(record, group, run)
            if verifier is not None:  # state may have changed while it was read
                verifier.require_unchanged(session.trainee, order.step, own_indices)
            if group.writer == rank:
                not_finite = "; ".join(filter(None, remarks))
                detail = f"{group.group}; {not_finite}" if not_finite else group.group
                written = Written(rank, order.incident, order.attempt, group.group, files, not_finite)
                say(written, "written", detail)
            else:
                note("gathered", group.group)
    except (Exception, SystemExit) as error:  # the controller decides the next attempt
        if is_current():
            reason = text.describe(error)
            doubted = error.ranks if isinstance(error, NotFiniteError) else ()
            write_key = (order.incident, order.attempt, group.group)
            say(WriteFailed(rank, *write_key, reason, session.board.record(), doubted), "failed", reason)
    finally:
        for store in stores:
            store.close()


def _bring_to(session: Session, order: Dump, wake: Callable[[], int]) -> None:
    """Bring this rank to the step of `order`; meanwhile wake the main thread again and again.

    A connection breaks whenever the main thread comes to use it, and a wait that gloo has forgotten is only
    recognised at the second call (`abort_collectives.Waker`).

    Raises:
        TimeoutError: the update was not done in the time of the order.
        RuntimeError: an exception left the update.
    """
    until = time.monotonic() + order.timeout_s
    while True:
        left_s = max(0.0, until - time.monotonic())
        try:
            return session.freezer.bring_to(order.step, wake, min(abort_collectives.LOOK_S, left_s))
        except TimeoutError:
            if left_s <= abort_collectives.LOOK_S:
                description = f"the update of step {order.step} was not done after {order.timeout_s:g} s"
                raise TimeoutError(description) from None


def _connect(
    order: Dump, group: GroupOrder, rank: int, ranks: tuple[int, ...], stores: list[DumpStore]
) -> ProcessGroupGloo:
    """Return a gloo group of `ranks`, independent of the framework's groups.

    The group's store is added to `stores`, to be closed after the group.
    """
    from adaptor.worker.dump_store import DumpStore, meet  # they import torch

    store = DumpStore(Endpoint(order.store_host, order.store_port), order.store_secret, order.timeout_s)
    stores.append(store)
    prefix = f"ttp/{order.incident}/{order.attempt}/{group.group}"
    return meet(store, prefix, ranks.index(rank), len(ranks), order.timeout_s)
