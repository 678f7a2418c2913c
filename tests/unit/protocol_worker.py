"""A worker that speaks the protocol and trains nothing; replaces `launchers/agent/worker_main.py`.

protocol_worker.py SCRIPT SAVE INDEX COUNT    holds shard INDEX of COUNT of group `g`

Commands come on stdin as for `worker_script.py`: `begin`, `step`, `raise`, `exit`. The worker prints
`recovered STEP` when all ranks continue. TTP_TEST_NEWCOMER chooses the fate of a replacement process: `ends`
at its start, `fails` to join, or `ends-once`, which leaves a file in SAVE. With TTP_TEST_DUMP=fails no rank
can write.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

from adaptor.protocol import environment, wire
from adaptor.protocol.board import Board
from adaptor.protocol.messages import (
    Dump,
    Exit,
    Freeze,
    FromWorker,
    Frozen,
    Hello,
    Joined,
    Layout,
    Proceed,
    Raised,
    Regroup,
    RegroupFailed,
    Share,
    ToWorker,
    WriteFailed,
    Written,
)
from adaptor.protocol.naming import FileEntry

ORIGIN = 10
RANK = int(os.environ["RANK"])
SAVE, INDEX, COUNT = sys.argv[2:]
NEWCOMER = os.environ.get(environment.NEWCOMER, "")
FATE = os.environ.get("TTP_TEST_NEWCOMER", "") if NEWCOMER else ""


class Worker:
    def __init__(self) -> None:
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect("\0" + os.environ[environment.AGENT])
        self.board = Board(RANK, os.environ[environment.BOARD], os.environ[environment.BOARD_RANKS])
        self.board.hold_lifeline()

    def say(self, message: FromWorker) -> None:
        self.connection.sendall(wire.frame(message))

    def layout(self) -> Layout:
        return Layout(RANK, (Share("g", int(INDEX), int(COUNT)),), SAVE, ORIGIN, "same", online="")

    def serve(self) -> None:
        while True:
            try:
                self.obey(wire.receive(self.connection, wire.to_worker))
            except (EOFError, OSError):
                os._exit(0)

    def obey(self, order: ToWorker) -> None:
        match order:
            case Freeze(incident=incident):
                self.say(Frozen(RANK, incident, self.board.record()))
            case Dump(incident=incident, attempt=attempt) if os.environ.get("TTP_TEST_DUMP") == "fails":
                self.say(WriteFailed(RANK, incident, attempt, "g", "it is a test", self.board.record()))
            case Dump(groups=(group,), attempt=attempt) if group.writer == RANK:
                entry = FileEntry("g.txt", len("state"), None, attempt)
                Path(order.folder, entry.draft).write_text("state")
                self.say(Written(RANK, order.incident, attempt, "g", (entry,)))
            case Regroup(incident=incident, attempt=attempt, step=step):
                if FATE == "fails":
                    self.say(RegroupFailed(RANK, incident, attempt, "it is a test"))
                    return
                if NEWCOMER:
                    self.say(self.layout())
                    self.board.start(step)
                self.say(Joined(RANK, incident, attempt, step, "digest"))
            case Proceed(step=step):
                self.board.finish(step)
                print("recovered", step, flush=True)
            case Exit():
                os._exit(0)


def main() -> None:
    once = Path(SAVE, "ended")
    if FATE == "ends" or (FATE == "ends-once" and not once.exists()):
        once.touch()
        os._exit(3)
    worker = Worker()
    worker.say(Hello(RANK, os.getpid()))
    print("here", flush=True)  # before any order is obeyed, whose print comes from the other thread
    threading.Thread(target=worker.serve, daemon=True).start()
    for line in sys.stdin:
        match line.split():
            case ["begin"]:
                worker.board.start(ORIGIN)
                worker.say(worker.layout())
            case ["step"]:
                worker.board.finish(worker.board.finished + 1)
            case ["raise"]:
                worker.say(Raised(RANK, "ValueError: told to raise", 1, calls='  File "loop.py", line 7'))
            case ["exit", _]:
                worker.board.end()
                os._exit(0)
        print("done", line.strip(), flush=True)
    threading.Event().wait(600)  # a newcomer has no stdin


main()
