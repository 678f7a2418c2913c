"""The hooks of the object store: checkpoint and data before workers start, and the processes that send.

The processes of a node send checkpoints (TTP_STORE) and outputs (TTP_STORE_ALSO). They only read folders, so
their failures do not reach the job: after a failure one line tells the user, and the process is started
again.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from adaptor import output, text
from adaptor.config import Config
from adaptor.errors import ConfigError
from adaptor.hooks import AgentHooks
from adaptor.launchers.agent.processes import STORE
from adaptor.launchers.cli import flags
from adaptor.launchers.store import store_load
from adaptor.protocol.environment import ending_signals
from adaptor.store.settings import End, OutputSettings, StoreSettings, UploadSettings

if TYPE_CHECKING:
    from torch.distributed import Store

# The first and the longest wait before another start; the wait doubles.
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
# The time of the process for its last line.
_LAST_LINE_S = 5.0


def require_writable(config: StoreSettings) -> None:
    """Refuse a store that cannot be written.

    Raises:
        ConfigError: the URL, the credentials, the bucket or the installation is wrong.
    """
    if not config.store:
        if useless := next(iter(_set_for_a_store(config)), ""):
            raise ConfigError(
                f"{useless} and TTP_STORE is not set: give the URL of the store, like --ttp-store"
                f" s3://bucket/run7, or leave out {useless.partition(' ')[0]}"
            )
        return
    for folder in config.store_also:
        if Path(folder).exists() and not Path(folder).is_dir():
            raise ConfigError(f"TTP_STORE_ALSO is {folder}: it is no folder")
    command = [sys.executable, str(STORE), "probe", config.store, config.store_endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            output_text = process.stdout.read().decode(errors="replace").strip()
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        reason = output_text or f"the process that tried it has ended with status {process.returncode}"
        raise ConfigError(f"TTP_STORE: {reason}")


def _set_for_a_store(config: StoreSettings) -> list[str]:
    """Return the settings, with their values, that say how files are sent to a store."""
    values = {
        "TTP_STORE_ALSO": next(iter(config.store_also), ""),
        "TTP_STORE_EVERY": config.store_every - 1 and config.store_every,  # 1: the default
        "TTP_STORE_KEEP": config.store_keep,
        "TTP_STORE_RATE": config.store_rate,
    }
    return [f"{name} is {value}" for name, value in values.items() if value]


class JobUploads:
    """The process of the node that sends checkpoints."""

    _command = "send"
    _noun = "checkpoint"

    def __init__(self, config: StoreSettings) -> None:
        self._config = config
        self._lock = threading.Lock()  # guards the attributes below
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._place = (0, 1)  # the number of the node, and the number of all nodes
        self._until: float | None = None  # on the monotonic clock
        self._has_told = False  # whether the user was told about a missing thread
        self._ends = threading.Event()

    def place(self, node: int, nodes: int) -> None:
        """Note that the node is number `node` of `nodes`; end a process with another number."""
        if (node, nodes) != self._place:
            self.stop()
            self._place = node, nodes

    def begin(self, save: Path) -> None:
        """Send saves in the folder `save` from now on; a thread starts the process."""
        config = self._config
        if config.store:
            self._begin(
                lambda place: UploadSettings(
                    config.store,
                    config.store_endpoint,
                    str(save),
                    config.store_every,
                    config.store_keep,
                    config.store_rate,
                    *place,
                )
            )

    def _begin(self, make_order: Callable[[tuple[int, int]], UploadSettings | OutputSettings]) -> None:
        """Start the process in a thread, unless it has been started.

        Args:
            make_order: returns the order for the number of the node, and of all nodes.
        """
        with self._lock:
            if self._thread is not None or self._ends.is_set():
                return
            order = make_order(self._place)
            thread = threading.Thread(target=self._keep_or_say, args=(order,), name="ttp-upload", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads for this process; the next call tries again
                if not self._has_told:
                    output.tell(
                        f"[ttp] no {self._noun} is sent to {self._config.store} yet: {text.say(error)}"
                    )
                self._has_told = True
                return
            self._thread = thread

    def leave(self, grace_s: float) -> None:
        """Limit the rest of the uploads to `grace_s` seconds; a line names unsent files."""
        self._until = time.monotonic() + grace_s

    def close(self) -> None:
        """Have the rest sent, and wait."""
        with self._lock:
            self._ends.set()
            self._tell_the_end()
            thread = self._thread
        if thread is not None:
            remaining_s = (
                None if self._until is None else max(0.0, self._until - time.monotonic()) + _LAST_LINE_S
            )
            thread.join(remaining_s)

    def stop(self) -> None:
        """End the process at once; `begin` starts another."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            process, self._process = self._process, None
            if process is not None:
                process.kill()
        thread.join(_LAST_LINE_S)

    def _tell_the_end(self) -> None:
        if self._process is not None:
            within_s = None if self._until is None else max(0.0, self._until - time.monotonic())
            self._write(self._process, End(within_s))

    def _write(
        self, process: subprocess.Popen[bytes], message: UploadSettings | OutputSettings | End
    ) -> None:
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # the process has ended, and its watcher prints a line
            process.stdin.write(msgspec.json.encode(message) + b"\n")
            process.stdin.flush()

    def _keep_or_say(self, order: UploadSettings | OutputSettings) -> None:
        """Call `_keep`; print a line after an unexpected error."""
        try:
            self._keep(order)
        except Exception as error:
            with self._lock:
                process, self._process = self._process, None
            if process is not None:
                process.kill()
                with contextlib.suppress(OSError), process:  # closes the pipe, and waits
                    pass
            output.tell(
                f"[ttp] no {self._noun} is sent to {self._config.store} any more: {text.describe(error)}"
            )

    def _keep(self, order: UploadSettings | OutputSettings) -> None:
        """Run the process again and again, until the job or the node's part in the job ends."""
        # The new process inherits the mask: a signal to all processes of the job may come before it ignores
        # signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP, *ending_signals()})
        wait_s = FIRST_WAIT_S
        while True:
            end_description, is_repeated = self._run_once(order)
            if not end_description:
                return
            output.tell(
                f"[ttp] the process that sends {self._noun}s to {order.url} has ended {end_description}; "
                + ("it is started again" if is_repeated else _unsent_warning(order))
            )
            if not is_repeated:
                return
            self._ends.wait(wait_s)  # if the job ends meanwhile, another process sends the newest checkpoint
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _run_once(self, order: UploadSettings | OutputSettings) -> tuple[str, bool]:
        """Run the process to its end.

        Returns:
            How the process ended, '' for an expected end; and whether another process is started, because
                the job had not ended by then.
        """
        with self._lock:
            if threading.current_thread() is not self._thread:
                return "", False
        try:  # without the lock, which the control thread takes: on a slow disk a start may take long
            process = subprocess.Popen(
                [sys.executable, str(STORE), self._command],
                stdin=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for ttprun
            )
        except OSError as error:
            return f"before it began ({text.say(error)})", not self._ends.is_set()
        with self._lock:
            if threading.current_thread() is not self._thread:  # `stop` was called meanwhile
                process.kill()
            else:
                self._process = process
                self._write(process, order)
                if self._ends.is_set():
                    self._tell_the_end()
        status = process.wait()
        with self._lock:
            # Under the lock, as `close`: if `close` finds no process, another process is started.
            is_repeated = not self._ends.is_set()
            expected = self._process is not process or (status == 0 and not is_repeated)
            if self._process is process:
                self._process = None
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        if expected:
            return "", False
        return f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}", is_repeated


class OutputUploads(JobUploads):
    """The process of the node that sends outputs other than checkpoints."""

    _command = "outputs"
    _noun = "output"

    def begin_outputs(self) -> None:
        """Send the files of the folders of TTP_STORE_ALSO from now on."""
        config = self._config
        if config.store_also:
            self._begin(
                lambda place: OutputSettings(
                    config.store, config.store_endpoint, config.store_also, config.store_rate, place[0]
                )
            )


def _unsent_warning(order: UploadSettings | OutputSettings) -> str:
    """Return the warning about unsent files if the uploader ends after the job: nobody starts it again."""
    if isinstance(order, OutputSettings):
        return f"files of {', '.join(order.folders)} may be on this machine only"
    if order.node:  # node 0 commits, and sends the rest if the nodes share the save folder
        return f"the part of node {order.node} of the newest one may be on this machine only"
    return (
        "the newest one may be on this machine only; this sends what the store does not have: "
        + order.push_command()
    )


class StoreHooks(AgentHooks):
    """TTP_STORE, TTP_PULL, and `--load` with the URL of a store."""

    def __init__(self, settings: Config) -> None:
        super().__init__(settings)
        self._own = settings.of(StoreSettings)
        self._resume: store_load.StoreResume | None = None
        self._checkpoints, self._outputs = JobUploads(self._own), OutputUploads(self._own)
        self._uploads = self._checkpoints, self._outputs  # in the order of their importance

    def require(self) -> None:
        store_load.require_pulls(self._own)

    def check(self, parsed: argparse.Namespace, engine: str) -> None:
        load = store_load.take(parsed)
        if load is None:
            return
        if engine:
            raise ConfigError(
                f"--load is {load.url}: with TTP_ENGINE={engine} nothing is pulled: use ttp store pull, and"
                " its folder"
            )
        keeps = parsed.rdzv_backend == "static" and flags.may_have_spares(parsed)
        self._resume = store_load.StoreResume(load, self._own.store_endpoint, keeps_ranks=keeps)

    def prepare(self) -> int:
        if self.settings.enabled:
            require_writable(self._own)
        return store_load.pull_data(self._own)

    def before_workers(
        self, node: int, nodes: int, store: Store, ranks: Sequence[int], world_size: int
    ) -> None:
        if self._resume is not None:
            self._resume.prepare(node, nodes, store, ranks, world_size)

    def begins(self, node: int, nodes: int) -> None:
        for uploads in self._uploads:
            uploads.place(node, nodes)
        self._outputs.begin_outputs()

    def saves_to(self, folder: Path) -> None:
        self._checkpoints.begin(folder)

    def leave(self, grace_s: float) -> None:
        for uploads in self._uploads:
            uploads.leave(grace_s)

    def close(self) -> None:
        for uploads in self._uploads:
            uploads.close()
