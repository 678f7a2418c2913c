"""Serves the files of a job on the node with the controller, in a process beside `ttprun` (TTP_SERVE).

    python .../job_server.py FOLDER SOCKET TOKEN_FILE CERTIFICATE KEY

SOCKET is the descriptor of a listening socket; '' stands for a missing file. Stdin is a pipe from `ttprun`:
its end means the end of `ttprun`. The program is started by its path, as `worker_main.py` is.

The process only reads files, so its failures do not reach the job; one line tells the user.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from adaptor import _script, output, plug_ins, text
from adaptor.config import Config
from adaptor.errors import ConfigError
from adaptor.launchers.agent import processes
from adaptor.operations import access
from adaptor.operations.access import ServeError
from adaptor.operations.settings import HostPort, OperationsSettings
from adaptor.protocol.environment import ending_signals

_NEEDS = ("jinja2", "prometheus_client")
# After a take-over on one machine the server of the lost ttprun keeps the port for a moment.
RETRY_S = 0.5
_RETRIES = 120
_END_S = 1.0
# Training goes first: for the processor, and where the memory of the machine ends.
_NICE = 5
_FIRST_TO_BE_ENDED = "1000"


def require(config: Config) -> None:
    """Refuse a TTP_SERVE that no node can serve.

    Raises:
        ConfigError: a package, a token or a certificate is missing, or cannot be used.
    """
    operations = config.of(OperationsSettings)
    if operations.serve is None:
        return
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"TTP_SERVE is {str(operations.serve)!r}: {' and '.join(missing)} must be installed:"
            f" {plug_ins.install_command('ops')}"
        )
    try:
        clients_of(operations.serve, operations.serve_token, config.tls_cert, config.tls_key)
    except ServeError as error:
        raise ConfigError(
            f"TTP_SERVE is {str(operations.serve)!r}, TTP_SERVE_TOKEN is"
            f" {'set' if operations.serve_token else 'not set'}, TTP_TLS_CERT is {config.tls_cert!r}: {error}"
        ) from None


def clients_of(address: HostPort, token: str, certificate: str, key: str) -> access.Clients:
    """Return the allowed clients of an address; for loopback without TLS.

    Args:
        address: to serve at.
        token, certificate, key: the paths of files; '' without a file.

    Raises:
        ServeError: other machines can connect and a file is missing or wrong.
    """
    certificate_files = (Path(certificate), Path(key)) if _speaks_tls(address, certificate) else None
    return access.clients(address, Path(token) if token else None, certificate_files)


def _speaks_tls(address: HostPort, certificate: str) -> bool:
    # To a loopback address only the machine itself connects.
    return bool(certificate) and not address.is_loopback


class JobServer:
    """The serving process, while the controller is on the node."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._own = config.of(OperationsSettings)
        self._process: subprocess.Popen[bytes] | None = None
        self._ends = threading.Event()
        self._has_taken_over = False

    def start(self, folder: Path) -> None:
        """Start the process that serves the job whose files are in `folder`, unless it runs.

        Raises:
            ServeError: the address is not available.
            OSError: no process can be started.
        """
        config, own = self._config, self._own
        if own.serve is None or (self._process is not None and self._process.poll() is None):
            return
        with access.listen(own.serve) as listening:
            bound = HostPort(*listening.getsockname()[:2])  # a name may mean a loopback address
            descriptor = listening.fileno()
            arguments = [str(folder), str(descriptor), own.serve_token, config.tls_cert, config.tls_key]
            process = self._process = subprocess.Popen(
                [sys.executable, str(processes.SERVE), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(descriptor,),
                start_new_session=True,  # Ctrl-C is for ttprun
            )
        scheme = "https" if _speaks_tls(bound, config.tls_cert) else "http"
        output.tell(f"[ttp] {scheme}://{own.serve}/ serves the page, /metrics and /api/v1/ of this job")
        watcher = threading.Thread(target=self._watch, args=(process,), name="ttp-serve", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads: nobody reports the end of the process
            watcher.start()

    def take_over(self, folder: Path) -> None:
        """Serve from the node that has the controller now; in a thread, and only the first time."""
        if self._own.serve is None or self._has_taken_over:
            return
        self._has_taken_over = True
        try:
            threading.Thread(
                target=self._start_when_free, args=(folder,), name="ttp-serve", daemon=True
            ).start()
        except RuntimeError as error:  # no more threads for this process
            self.tell_why(error)

    def close(self) -> None:
        """End the process."""
        self._ends.set()
        if self._process is not None:
            processes.end(self._process, _END_S)

    def _start_when_free(self, folder: Path) -> None:
        reason: Exception | None = None
        for _ in range(_RETRIES):
            try:
                self.start(folder)
                return
            except (ServeError, OSError, RuntimeError) as error:
                reason = error
            if self._ends.wait(RETRY_S):
                return
        self.tell_why(reason)

    def tell_why(self, reason: Exception | None) -> None:
        """Print why this node does not serve the job."""
        output.tell(f"[ttp] this node does not serve the job: TTP_SERVE is {text.say(reason)}")

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not self._ends.is_set():
            output.tell(
                f"[ttp] the process that serves this job at {self._own.serve} has ended with status"
                f" {status}; the job goes on, and `ttp serve` shows it"
            )


def main() -> None:
    """Serve the files of a job until the end of ttprun."""
    _script.leave_own_path()
    from adaptor.operations import serve

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
