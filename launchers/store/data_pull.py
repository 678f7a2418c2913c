"""Downloads the data of a job to the node before anything starts (TTP_PULL)."""

from __future__ import annotations

import os
import subprocess
import sys

from adaptor import output
from adaptor.config import Config
from adaptor.errors import ConfigError, StoreError
from adaptor.launchers.agent import programs
from adaptor.store import address

# The process removes an incomplete file and ends: at once, or within ten seconds if its disk hangs.
_LEAVING_S = 15.0


def require(config: Config) -> None:
    """Refuse URLs that name no store, and impossible folders, without asking a store.

    Raises:
        ConfigError: names the URL, or the folder.
    """
    folders = set()
    for pull in config.pull:
        try:
            place = address.parse(pull.url)
        except StoreError as error:
            raise ConfigError(f"TTP_PULL: {error}") from None
        folder = os.path.realpath(pull.folder)
        source = os.path.realpath(place.prefix) if place.scheme == "file" else ""
        if source and os.path.commonpath([folder, source]) == source:
            raise ConfigError(
                f"TTP_PULL: {pull.folder} is inside {pull.url}, so what has come would come again at the next"
                " start: name a folder outside of it"
            )
        if folder in folders:
            raise ConfigError(f"TTP_PULL names the folder {pull.folder} twice: give each URL its own")
        folders.add(folder)


def bring(config: Config) -> int:
    """Download all data, in another process; call on the main thread.

    Returns:
        0; or the exit code after a signal, with a line for the user.

    Raises:
        ConfigError: a download failed; names the URL or the folder.
    """
    if not config.pull:
        return 0
    from adaptor.launchers.rendezvous.waiting import Interrupted, wait_for  # torch

    pairs = [word for pull in config.pull for word in (pull.url, pull.folder)]
    description = " and ".join(
        f"the data of {pull.url}, which comes to {pull.folder}" for pull in config.pull
    )
    try:
        process = subprocess.Popen(
            [sys.executable, str(programs.DATA), config.store_endpoint, *pairs],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for ttprun
        )
    except OSError as error:
        raise ConfigError(f"TTP_PULL: no process can be started ({error.strerror})") from None
    with process:
        assert process.stdout is not None
        try:
            answer = wait_for(process.stdout.read, lambda: description, quiet=True)  # it tells how far it is
        except Interrupted as error:
            programs.end(process, _LEAVING_S)
            output.tell(
                f"[ttp] ended by {error.sigval.name} while it waited for {error.what}; nothing was started"
            )
            return 128 + error.sigval
        except BaseException:
            programs.end(process, _LEAVING_S)
            raise
    if process.returncode:
        reason = answer.decode(errors="replace").strip()
        raise ConfigError(
            f"TTP_PULL: {reason or f'the process that pulls has ended with status {process.returncode}'}"
        )
    return 0
