"""A process beside `ttprun` that serves the files of its job (`--ttp-serve`), and ends with `ttprun`.

    python .../serve_main.py FOLDER SOCKET TOKEN_FILE CERTIFICATE KEY

SOCKET is the descriptor of a listening socket; '' stands for a missing file. Stdin is a pipe from `ttprun`:
its end means the end of `ttprun`. The program is started by its path, as `worker_main.py` is.
"""

from __future__ import annotations

import sys

from adaptor import _script

# Training goes first: for the processor, and where the memory of the machine ends.
_NICE = 5
_FIRST_TO_BE_ENDED = "1000"


def main() -> None:
    """Serve the files of a job until the end of ttprun."""
    _script.leave_own_path()
    import contextlib
    import os
    import signal
    import socket
    import threading
    from pathlib import Path

    from adaptor.launchers.operations.job_server import clients_of
    from adaptor.operations import serve
    from adaptor.operations.settings import HostPort
    from adaptor.protocol.environment import ending_signals

    # A signal to all processes of a job, as from Slurm, is for ttprun, which saves first and is watched
    # meanwhile.
    for number in (signal.SIGHUP, *ending_signals()):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_BE_ENDED)
    folder, descriptor, token, certificate, key = sys.argv[1:]
    listening = socket.socket(fileno=int(descriptor))
    clients = clients_of(HostPort(*listening.getsockname()[:2]), token, certificate, key)
    server = serve.Server(Path(folder), listening, clients)
    threading.Thread(target=server.serve_forever, name="ttp-serve", daemon=True).start()
    sys.stdin.buffer.read()
    os._exit(0)  # nothing to keep, and a client may still be connected


if __name__ == "__main__":
    main()
