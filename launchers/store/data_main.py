"""A process of `ttprun` that downloads the data of a job from object stores, and ends with `ttprun`.

    python .../data_main.py ENDPOINT URL FOLDER [URL FOLDER ...]

Stdin is a pipe from `ttprun`: its end means the end of `ttprun`. Progress goes to stderr; an error goes to
stdout as one line, with exit code 2. The program is started by its path, as `worker_main.py` is.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from adaptor import _script

if TYPE_CHECKING:
    from types import FrameType

# The most seconds of the process after the end of ttprun, if its disk hangs.
_LEAVING_S = 10.0


def main() -> None:
    """Download the objects below each URL to its folder."""
    _script.leave_own_path()
    import os
    import signal
    import threading
    from pathlib import Path

    from adaptor import output
    from adaptor.errors import AdaptorError
    from adaptor.operations.words import shown
    from adaptor.store import data_pull
    from adaptor.store.opening import open_waiting

    # Ctrl-C and signals to all processes of a job are for ttprun, which ends this process with a line.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(1)  # removes the incomplete file

    def tell(line: str) -> None:
        output.tell(shown(line))

    def hear() -> None:
        while os.read(0, 4096):
            pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        threading.Event().wait(_LEAVING_S)
        os._exit(1)

    signal.signal(signal.SIGUSR1, leave)
    threading.Thread(target=hear, name="ttp-hear", daemon=True).start()
    endpoint, *pairs = sys.argv[1:]
    code = 0
    try:
        pulls = [
            (open_waiting(url, endpoint, lambda line: tell(f"[ttp] {line}")), Path(folder))
            for url, folder in zip(pairs[::2], pairs[1::2], strict=True)
        ]
        data_pull.bring(pulls, tell)
    except AdaptorError as error:
        print(shown(str(error)))
        code = 2
    except SystemExit:
        os._exit(1)
    output.finish()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
