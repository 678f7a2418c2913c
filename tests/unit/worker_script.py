"""A training script that executes commands from stdin, one per line, under the worker's real bootstrap.

worker_script.py SAVE INDEX COUNT    holds shard INDEX of COUNT of group `g`

`step`, `skip` take the next step; `door` begins a step and waits in the barrier on a TCP connection, as a
collective does; `raise`, `raise-inside` raise between steps, or inside of the update window; `refuse` reports
the job as unsupported; `exit N` leaves by sys.exit; `leave N` ends the process by os._exit; `child` starts a
child process, `fork` forks the worker; `replace` executes another program, which reads its exit code from
stdin; `debug` enters pdb, with commands from the next lines (for example `board.enter(step + 1)`, a step that
ends soon); `hold` never releases the interpreter lock. Each command is answered on stdout.
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
    """Block until the connection is shut down, then raise as gloo does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        server_end, _ = server.accept()
    with client, server_end:
        print("waiting", flush=True)
        client.recv(1)
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
