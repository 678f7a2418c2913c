"""The interface of an engine (`adaptor.engines`) in a worker."""

from __future__ import annotations

from typing import Protocol

from adaptor.worker.session import Session


class WorkerRuntime(Protocol):
    """A worker's session and its reports of failures, the same for each engine (TTP_ENGINE)."""

    @property
    def rank(self) -> int:
        """Return the rank of this process."""

    @property
    def pid(self) -> int:
        """Return the process number of the worker; a forked child has another number, and is no worker."""

    @property
    def session(self) -> Session:
        """Return the session of this process."""

    def hear_signals(self) -> None:
        """Install the handlers of signals; on the main thread."""

    def refuse(self, reason: str) -> None:
        """Refuse the job, in one line; does not return."""

    def raised(self, error: str, exit_code: int, by: BaseException | None = None) -> None:
        """Report that an exception left the script; the state is kept."""

    def hold_after(self, error: BaseException) -> None:
        """Report the exception, and keep the process, whose state may be saved."""

    def not_protected(self, reason: str) -> None:
        """Report why the training of this process cannot be saved."""

    def finish(self) -> None:
        """Report that the script has come to its end."""
