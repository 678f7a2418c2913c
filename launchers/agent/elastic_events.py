"""The incidents of a job as events of torch elastic, for tools that read its events (docs/exit_codes.md)."""

from __future__ import annotations

import logging
import time
from functools import partial

from torch.distributed.elastic import events
from torch.distributed.elastic.events import Event, EventSource

from adaptor import output, text
from adaptor.errors import ConfigError
from adaptor.protocol.messages import Recovered, Verdict

INCIDENT = "ttp.incident"
VERDICT = "ttp.verdict"


class ElasticEvents:
    """Records two events for each verdict that an agent gets, once it has it.

    The handler of the events, which somebody else has written, is called in a thread of its own, for torch's
    own events, too. So one that raises or hangs holds up nothing but further events.

    Args:
        destination: the name of a handler of torch elastic (`--event-log-handler`).
        run_id: of the job, as torch elastic names it in its own events.

    Raises:
        ConfigError: there is no such handler.
    """

    def __init__(self, destination: str, run_id: str) -> None:
        self._destination = destination
        self._run_id = run_id
        try:
            logger = events._get_or_create_logger(destination)
        except KeyError:
            raise ConfigError(
                f"--event-log-handler is {destination!r}: torch elastic has no handler of that name;"
                " leave it out, or take console or null"
            ) from None
        for handler in list(logger.handlers):
            if not isinstance(handler, _InItsThread | logging.NullHandler):
                logger.removeHandler(handler)
                logger.addHandler(_InItsThread(handler))

    def conclude(self, verdict: Verdict, node: int, noticed: float) -> None:
        """Record that an incident was noticed, and how it has ended.

        Args:
            verdict: the end of the incident.
            node: this agent's, as torch elastic's group rank.
            noticed: when it learnt of the fault, in Unix seconds.
        """
        event_data: dict[str, str | int | float | bool | None] = {
            "run_id": self._run_id,
            "group_rank": node,
            "incident": verdict.incident,
            "rank": verdict.cause_rank if verdict.cause_rank >= 0 else None,
            "step": verdict.newest if verdict.newest >= 0 else None,
            "cause": verdict.line,
        }
        concluded = {
            **event_data,
            "step": verdict.step if verdict.outcome == "saved" else None,
            "outcome": verdict.outcome,
            "exit_code": verdict.exit_code,
        }
        self._record((INCIDENT, noticed, event_data), (VERDICT, time.time(), concluded))

    def go_on(self, recovered: Recovered, node: int) -> None:
        """Record an incident after which training went on online: its outcome is `recovered`.

        Args:
            recovered: the end of the incident.
            node: this agent's, as torch elastic's group rank.
        """
        time_now = time.time()
        event_data: dict[str, str | int | float | bool | None] = {
            "run_id": self._run_id,
            "group_rank": node,
            "incident": recovered.incident,
            "rank": next(iter(recovered.fault.ranks), None),
            "step": recovered.step,
            "cause": recovered.line,
        }
        concluded = {**event_data, "outcome": "recovered", "exit_code": None}
        self._record((INCIDENT, time_now - recovered.seconds, event_data), (VERDICT, time_now, concluded))

    def _record(self, *all_of_one: tuple[str, float, dict[str, str | int | float | bool | None]]) -> None:
        for name, at, metadata in all_of_one:
            try:
                events.record(Event(name, EventSource.AGENT, int(at * 1000), metadata), self._destination)
            except Exception as error:  # it is for people
                output.tell(f"[ttp] the event {name} is not recorded: {text.describe(error)}")


class _InItsThread(logging.Handler):
    """Passes events on to `handler` in a thread of its own, which alone calls it.

    So it is called without its lock: `logging` takes the locks of all handlers when a process ends, and would
    wait for one that hangs.
    """

    def __init__(self, handler: logging.Handler) -> None:
        super().__init__(handler.level)
        self._handler = handler
        self._writer = output.Writer("ttp-events")
        self._writer.start()  # in an incident there may be no thread to be had any more

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.submit(partial(_emit, self._handler, record))


def _emit(handler: logging.Handler, record: logging.LogRecord) -> None:
    try:
        if handler.filter(record):
            handler.emit(record)
    except BaseException as error:  # whatever somebody's handler raises
        output.tell(f"[ttp] an event of torch elastic is not recorded: {type(error).__name__}: {error}")
