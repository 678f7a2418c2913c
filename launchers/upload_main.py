"""A process beside `ttprun` that sends the checkpoints of its job to a store, and ends with it.

    python .../upload_main.py probe URL ENDPOINT     whether the store takes an object
    python .../upload_main.py send                   until the job ends

On stdin, a pipe from `ttprun`, comes the order, and at the end of the job how long it may still take; the end
of the pipe means that `ttprun` has ended. It is started by its path, as `worker_main.py` is.
"""

from __future__ import annotations

import sys

from adaptor import _script

# Training goes first: for the processor, and where the memory of the machine ends.
_NICE = 10
_FIRST_TO_BE_ENDED = "1000"


def main() -> None:
    """Do what the arguments say."""
    _script.leave_own_path()
    import contextlib
    import os
    import signal
    import threading
    from pathlib import Path

    import msgspec

    from adaptor import output
    from adaptor.errors import StoreError
    from adaptor.store import uploader

    if sys.argv[1] == "probe":
        try:
            uploader.probe(*sys.argv[2:])
        except StoreError as error:
            print(error)
            sys.exit(2)
        return

    # What tells a whole job to end, as Slurm does, is for ttprun: it saves first, and that is sent.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_BE_ENDED)
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=uploader.Order)
    sending = uploader.Uploader(order, lambda line: output.tell(line, to="stdout"))

    def leave(why: str) -> None:
        sending.tell_what_is_local(why)
        output.finish()
        os._exit(0)  # a request may be on its way

    def hear() -> None:
        text = sys.stdin.buffer.readline()
        if text:
            within_s = msgspec.json.decode(text, type=uploader.End).within_s
            sending.end()
            if within_s is not None:
                timer = threading.Timer(within_s, leave, ("TTP_GRACE is over",))
                timer.daemon = True
                timer.start()
            sys.stdin.buffer.read()
        leave("ttprun has ended")

    threading.Thread(target=hear, name="ttp-hear", daemon=True).start()
    sending.run()
    output.finish()
    os._exit(0)


if __name__ == "__main__":
    main()
