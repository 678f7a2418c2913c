"""Files from object stores that a job needs before it starts: its checkpoint, and its data.

TTP_PULL names data (`pull_data`). `--load s3://bucket/run7` in the arguments of a script names the checkpoint
(`take`), which `StoreResume` brings to the nodes before their workers start. Node 0 chooses the step,
downloads it to the save folder and tells the other nodes. A node that sees the step in its folder shares the
folder; another node downloads the same step to its own folder: only the part for its ranks, if known and if
nodes keep their ranks at restarts. The script loads from its save folder, so restarts resume from the save
folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from adaptor import output
from adaptor.checkpoint import tracker
from adaptor.errors import ConfigError, ResumeError, StoreError
from adaptor.launchers.agent import processes
from adaptor.launchers.cli import flags
from adaptor.protocol.framework_options import START_ONLY
from adaptor.store import settings
from adaptor.store.settings import StoreSettings

if TYPE_CHECKING:
    from torch.distributed import Store

    from adaptor.store.pull import NodeRanks

# Options with which a run begins a new count of steps from a checkpoint. The pulled checkpoint comes to the
# save folder, where a restart would go on from its step, and a saved step with a smaller number would never
# be named. `--ckpt-step` names the pulled step.
_BEGINS_ANEW = [f"--{name.replace('_', '-')}" for name in START_ONLY if name != "ckpt_step"]
_SIZES = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
# Options with which ranks have other numbers, or sizes are set elsewhere.
_NUMBERS_OTHERWISE = ("--use-tp-pp-dp-mapping", "--encoder-", "--yaml-cfg", "--use-checkpoint-args")
# The process of TTP_PULL removes an incomplete file and ends: at once, or within ten seconds if its disk
# hangs.
_LEAVING_S = 15.0
# The key of the resumed step, or of the reason why there is none, in the store of a generation.
_KEY = "ttp/resume"
_REFUSED = "!"


@dataclass(frozen=True)
class Load:
    """The checkpoint that the script is to load.

    Attributes:
        step: the value of --ckpt-step, None without
        sizes: tensor and pipeline parallel sizes, if ranks are numbered in the framework's default way
    """

    url: str
    save: Path
    step: int | None
    sizes: tuple[int, int] | None = None


def take(parsed: argparse.Namespace) -> Load | None:
    """Return the checkpoint to load from a store, and let the script load from its save folder instead.

    Args:
        parsed: the arguments of ttprun; the script's arguments are changed.

    Raises:
        ConfigError: the URL is wrong, no save folder is set, or the script is to begin from the checkpoint.
    """
    arguments: list[str] = parsed.training_script_args
    url = flags.script_option(arguments, "--load")
    if url is None or url.partition("://")[0] not in settings.SCHEMES or "://" not in url:
        return None
    try:
        place = str(settings.parse(url))
    except StoreError as error:
        raise ConfigError(f"--load: {error}") from None
    save, step = flags.script_option(arguments, "--save"), flags.script_option(arguments, "--ckpt-step")
    if not save or "://" in save:
        raise ConfigError(f"--load is {place}: it is pulled to the folder of --save, and that is missing")
    if step is not None and not (step.isascii() and step.isdigit()):
        raise ConfigError(f"--ckpt-step is {step!r}: it must be a number from 0 on")
    for name in _BEGINS_ANEW:
        if any(argument == name or argument.startswith(f"{name}=") for argument in arguments):
            raise ConfigError(
                f"--load is {place} with {name}: what is pulled comes to the folder of --save, and a job "
                f"goes on from it; bring it to another folder (ttp store pull {place} FOLDER), and give that "
                "as --load"
            )
    parsed.training_script_args = _replaced(arguments, "--load", save)
    return Load(url, Path(save), int(step) if step is not None else None, _sizes(parsed.training_script_args))


def _sizes(arguments: Sequence[str]) -> tuple[int, int] | None:
    if any(argument.startswith(_NUMBERS_OTHERWISE) for argument in arguments):
        return None
    size_texts = [flags.script_option(arguments, name) or "1" for name in _SIZES]
    if not all(size.isascii() and size.isdigit() and int(size) for size in size_texts):
        return None
    tensor, pipeline = map(int, size_texts)
    return tensor, pipeline


def _replaced(arguments: Sequence[str], name: str, value: str) -> list[str]:
    new_arguments, skips = [], False
    for argument in arguments:
        if skips:
            new_arguments.append(value)
        elif argument.startswith(f"{name}="):
            new_arguments.append(f"{name}={value}")
        else:
            new_arguments.append(argument)
        skips = not skips and argument == name
    return new_arguments


def require_pulls(config: StoreSettings) -> None:
    """Refuse URLs that name no store, and impossible folders, without asking a store.

    Raises:
        ConfigError: names the URL, or the folder.
    """
    folders = set()
    for pull in config.pull:
        try:
            place = settings.parse(pull.url)
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


def pull_data(config: StoreSettings) -> int:
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
            [sys.executable, str(processes.STORE), "data", config.store_endpoint, *pairs],
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
            processes.end(process, _LEAVING_S)
            output.tell(
                f"[ttp] ended by {error.sigval.name} while it waited for {error.what}; nothing was started"
            )
            return 128 + error.sigval
        except BaseException:
            processes.end(process, _LEAVING_S)
            raise
    if process.returncode:
        reason = answer.decode(errors="replace").strip()
        raise ConfigError(
            f"TTP_PULL: {reason or f'the process that pulls has ended with status {process.returncode}'}"
        )
    return 0


class StoreResume:
    """Brings the checkpoint before the workers of a generation start.

    Args:
        load: the checkpoint for the script.
        endpoint: the setting TTP_STORE_ENDPOINT.
        keeps_ranks: whether each node has the same ranks at each start.
    """

    def __init__(self, load: Load, endpoint: str, *, keeps_ranks: bool = False) -> None:
        self._load = load
        self._endpoint = endpoint
        self._keeps_ranks = keeps_ranks
        self._is_first = True  # whether the agent's first generation starts

    def prepare(
        self, node: int, nodes: int, store: Store, ranks: Sequence[int] = (), world_size: int = 0
    ) -> None:
        """Bring the checkpoint for the workers of the node to its save folder.

        Args:
            store: has keys of this generation alone.

        Raises:
            ResumeError: nothing can be loaded.
            OSError: no process can be started.
        """
        if node == 0:
            try:
                step = tracker.tracked_step(self._load.save)
                if self._is_first:
                    step = self._pull(self._load.step)
            except BaseException as error:
                if nodes > 1:  # otherwise the other nodes would wait forever
                    store.set(_KEY, f"{_REFUSED}{error or type(error).__name__}")
                raise
            if nodes > 1:
                store.set(_KEY, json.dumps(step))
        elif self._is_first:
            puller = f"node 0, which pulls {self._load.url}"
            start_message = _wait_for_step(store, puller).decode()
            if start_message.startswith(_REFUSED):
                raise ResumeError(start_message.removeprefix(_REFUSED))
            step = json.loads(start_message)
            if step is not None:
                self._pull_here(step, ranks, world_size)
        self._is_first = False

    def _pull_here(self, step: int, ranks: Sequence[int], world_size: int) -> None:
        """Download to a folder of the node, unless the folder is shared with node 0 or complete."""
        from adaptor.store import pull

        load, needs = self._load, None
        if self._keeps_ranks and ranks and load.sizes is not None:
            needs = pull.NodeRanks(tuple(ranks), world_size, *load.sizes)
        # A part may belong to other ranks.
        if pull.is_part(load.save, step) or not tracker.is_complete(load.save, step):
            self._pull(step, needs)

    def _pull(self, step: int | None, needs: NodeRanks | None = None) -> int | None:
        """Download in another process; return the step, None if the store is empty."""
        from adaptor.launchers.rendezvous.waiting import wait_for

        load = self._load
        description = f"the checkpoint of {load.url}, which comes to {load.save}"
        command = [
            sys.executable,
            str(processes.STORE),
            "pull",
            load.url,
            self._endpoint,
            str(load.save),
            json.dumps(step),
            msgspec.json.encode(needs).decode(),
        ]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            read = process.stdout.read
            try:
                answer = wait_for(read, lambda: description)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            reason = answer.decode(errors="replace").strip()
            raise ResumeError(
                f"--load: {reason or f'the process that pulls has ended with status {process.returncode}'}"
            )
        pulled: int | None = json.loads(answer)
        return pulled


def _wait_for_step(store: Store, puller: str) -> bytes:
    """Wait for node 0, however long the download takes, as long as the store answers."""
    from torch.distributed import DistStoreError

    from adaptor.launchers.rendezvous.waiting import ask

    while True:
        try:
            return ask(store, lambda: store.get(_KEY), lambda: puller)
        except DistStoreError as error:
            if "timeout" not in str(error).lower():
                raise
