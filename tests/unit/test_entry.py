"""The end of the program `ttprun`: exit functions and threads, but no destruction of modules."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import atexit, threading, time
from concurrent.futures import ThreadPoolExecutor
from adaptor.launchers.cli import entry, ttprun

class Late:
    def __del__(self):
        print("module destroyed", flush=True)

def run():
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread ended"))).start()
    pool = ThreadPoolExecutor(1)
    pool.submit(int).result()
    globals()["pool"] = pool
    return 7

late = Late()
atexit.register(print, "exit function")
ttprun.main = run
entry.main()
"""


def test_the_end_of_the_program() -> None:
    """The destruction of torch's modules took ten seconds on a busy machine, after the last line."""
    completed = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (completed.returncode, completed.stderr) == (7, "")
    assert completed.stdout.splitlines() == ["thread ended", "exit function"]
