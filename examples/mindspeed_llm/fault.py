"""`python fault.py --rank R --after STEP -- COMMAND...`: run a training, and kill a rank of it once.

When the training has logged STEP, the process of rank R gets SIGKILL, as where the memory of a node runs out.
Needs /proc. The exit code is the command's; 1 where nobody was killed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path


def process_of(rank: int, ancestor: int) -> int | None:
    """Return the process with RANK=`rank` in its environment whose parent is `ancestor`, if there is one."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == ancestor and f"RANK={rank}".encode() in (folder / "environ").read_bytes().split(
                    b"\0"
                ):
                    return int(folder.name)
            except (OSError, ValueError, IndexError):
                continue  # it has ended
    return None


def run(command: list[str], rank: int, step: int) -> int:
    """Run the command, its output with this program's; return its exit code, or 1 without a kill."""
    killed = None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as job:
        assert job.stdout is not None
        for line in job.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            logged = re.search(r"iteration +(\d+)/", line)
            if killed is None and logged and int(logged[1]) >= step:
                killed = process_of(rank, job.pid)
                if killed is not None:
                    os.kill(killed, signal.SIGKILL)
                    print(
                        f"fault.py: killed rank {rank} (process {killed}) after step {logged[1]}", flush=True
                    )
    if killed is None:
        print(f"fault.py: rank {rank} was not killed: no step {step} was logged, or it had ended", flush=True)
    return job.returncode if killed is not None else job.returncode or 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Run a training, and kill a rank of it once.")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--after", type=int, required=True, help="the step after which it is killed")
    parser.add_argument("command", nargs="+")
    parsed = parser.parse_args()
    sys.exit(run(parsed.command, parsed.rank, parsed.after))


if __name__ == "__main__":
    main()
