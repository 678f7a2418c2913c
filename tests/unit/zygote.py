"""Imports torch once, then runs ttprun in a fork of itself for each line of JSON on stdin.

{"argv": [...], "cwd": "...", "env": {...}, "log": "...", "prelude": "..."}; the answer is the pid of the
fork.

`prelude` is Python code that the fork runs first; `log` takes the output. A line {"wait": pid} returns the
exit status, then the CPU seconds of the fork and its children.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NoReturn

import torch.distributed.elastic.agent.server.local_elastic_agent
import torch.distributed.launcher.api
import torch.distributed.run  # noqa: F401

import adaptor.launchers.cli.ttprun  # noqa: F401
from adaptor.launchers.cli import entry
from tests.faults.warm import leave


def run(job: dict[str, Any]) -> NoReturn:
    os.setsid()
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for descriptor, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(target, descriptor)
    exec(job["prelude"], {})
    sys.argv = ["ttprun", *job["argv"]]
    try:
        status = entry.main()
    except SystemExit as end:
        leave(end.code)
    leave(status)


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if "wait" in job:
            _, status, used = os.wait4(job["wait"], 0)
            print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            run(job)
        print(pid, flush=True)


main()
