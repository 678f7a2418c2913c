"""Reading the frames of all threads while a garbage collection is due."""

from __future__ import annotations

import subprocess
import sys

from tests.unit.threads import LONG_S

# A collection is due after a hundred new objects, and its callback reads frames, too. Python 3.11 deadlocks
# on its own lock if the frames are read by `sys._current_frames` alone.
PROGRAM = """
import gc, sys, threading
from adaptor.worker import stacks
waits = threading.Event()
for _ in range(200):
    threading.Thread(target=waits.wait, daemon=True).start()
def collect(phase, info):
    sys._current_frames()
gc.collect()
gc.callbacks.append(collect)
gc.set_threshold(100)
found = stacks.all_frames()
print(len(found), gc.isenabled(), stacks.frame_of(threading.get_ident()).f_code.co_name)
gc.disable()
stacks.all_frames()
print(gc.isenabled())
"""


def test_no_collection_begins_while_frames_are_read() -> None:
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=LONG_S
    )
    assert completed.stdout.split("\n") == ["201 True all_frames", "False", ""]
