"""A training script that does what it is told on stdin, a line at a time, run by the worker's real bootstrap.

    worker_script.py SAVE INDEX COUNT    holds shard INDEX of COUNT of group `g`

`step`, `skip` take the next step; `door` begins it and stands in the barrier, which waits on a TCP connection
as a collective does; `raise`, `raise-inside` raise between steps, or inside of the update window; `refuse`
says that this cannot be protected; `exit N` leaves by sys.exit; `leave N` ends the process on the spot;
`child` starts a process of this worker's own, `fork` one that is a copy of it; `replace` becomes another
program, which ends with the code that it reads; `debug` stands in a debugger, whose commands follow (one of
them is `board.enter(step + 1)`, a step that is to end soon); `hold` never lets go of the interpreter lock.
Each is answered on stdout.
"""

from __future__ import annotations

import os
import pdb
import socket
import subprocess
import sys
import threading

from adaptor.errors import UnsupportedError
from adaptor.protocol.messages import Share
from adaptor.worker import runtime
from tests.faults.fault import hold_the_interpreter_lock
from tests.unit.trainee import CountingTrainee, Loop

ORIGIN = 10


def collective() -> None:
    """Hangs until somebody shuts the connection down, then raises as gloo does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    with here, there:
        print("waiting", flush=True)
        here.recv(1)
        raise RuntimeError("Connection closed by peer")


def main() -> None:
    save, index, count = sys.argv[1:]
    trainee = CountingTrainee(save, (Share("g", int(index), int(count)),))
    loop = Loop(runtime.get().session, trainee)
    print("here", flush=True)
    step = ORIGIN
    for line in sys.stdin:
        match line.split():
            case ["begin"]:
                loop.begin(ORIGIN)
            case ["step"]:
                step += 1
                loop.step(step)
            case ["skip"]:
                step += 1
                loop.skip(step)
            case ["door"]:
                step += 1
                trainee.barrier = collective
                loop.step(step)
            case ["raise"]:
                raise ValueError("told to raise")
            case ["raise-inside"]:
                loop.session.begin_step(step + 1)
                loop.session.before_update(loop.inner[0])
                raise ValueError("told to raise inside")
            case ["refuse"]:
                raise UnsupportedError("--optimizer is sgd: it cannot be protected yet")
            case ["exit", code]:
                sys.exit(int(code))
            case ["leave", code]:
                os._exit(int(code))
            case ["replace"]:
                program = "print('replaced', flush=True); raise SystemExit(int(input()))"
                os.execv(sys.executable, [sys.executable, "-c", program])
            case ["debug"]:
                board = loop.session.board
                board.slowest = 0.1
                pdb.Pdb(nosigint=True).set_trace()
            case ["hold"]:
                print("holding", flush=True)
                hold_the_interpreter_lock()
            case ["fork"]:
                child = os.fork()
                if child == 0:
                    threading.Event().wait()
                print(child, flush=True)
            case ["child"]:
                print(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL).pid, flush=True)
        print("done", line.strip(), flush=True)


main()
