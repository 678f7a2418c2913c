"""The environment variables from an agent to its workers and of torch elastic, and the files of stacks."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from adaptor.context import Context

NOT_BY_TTPRUN = (
    "the adaptor is enabled, but this process was not started by ttprun:"
    " start the job with ttprun instead of torchrun, or set ENABLE_TTP=False"
)
IN_A_CHILD = (
    "this process was not started by ttprun itself, but by the script of a rank: a rank is protected in the"
    " process that ttprun starts for it; let ttprun start all of them (--nproc-per-node), or set"
    " ENABLE_TTP=False"
)

# These end a job whatever torch handles.
BY_HAND = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
# The variable in which torch lists the signals with handlers (--signals-to-handle).
HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"
_NAMES = signal.Signals.__members__.keys() - {"SIGKILL", "SIGSTOP"}
# Asks a worker that does not answer for its stacks. No framework uses real-time signals, and an agent sends
# this signal only to a process that handles it.
STACK_SIGNAL = signal.SIGRTMIN + 13

# Set by the agent for its workers, besides the variables of torch elastic.
AGENT = "TTP_AGENT"
BOARD = "TTP_BOARD"
BOARD_RANKS = "TTP_BOARD_RANKS"
SCRATCH = "TTP_SCRATCH"
GENERATION = "TTP_GENERATION"
IS_RESTART = "TTP_IS_RESTART"
# The files of host copies that the agent holds: JSON, for each rank the paths of its files.
COPY_FILES = "TTP_COPY_FILES"
# 1: workers are started to write host copies to disk, and do not train.
ONLY_COPIES = "TTP_ONLY_COPIES"
# The number of the incident in which this process replaces another; not set at a start of all workers.
NEWCOMER = "TTP_NEWCOMER"
# The line of the incident before this start of all workers; empty at the first start.
LAST_INCIDENT = "TTP_LAST_INCIDENT"
# With --nnodes MIN:MAX, MIN:MAX and the number of nodes before this start, 0 at the first start; not set if
# the number of nodes is fixed.
NODES = "TTP_NODES"
NODES_BEFORE = "TTP_NODES_BEFORE"


class Generation:
    """The start of the workers with this process, a part of its context.

    Attributes:
        name: of the start, drawn at random; "" outside of ttprun
        is_restart: whether workers of the job ran before, so that the job goes on from its save folder
        last_incident: the line of the incident before this start; "" without an incident, and in a
            replacement of another process
    """

    def __init__(self, context: Context) -> None:
        self.name = os.environ.get(GENERATION, "")
        self.is_restart = os.environ.get(IS_RESTART, "0") == "1"
        self.last_incident = "" if NEWCOMER in os.environ else os.environ.get(LAST_INCIDENT, "")


class Scratch:
    """The agent's scratch folder, a part of the context of a process.

    Attributes:
        path: on a local disk, removed when the agent ends; None outside of ttprun
    """

    def __init__(self, context: Context) -> None:
        scratch_folder = os.environ.get(SCRATCH)
        self.path = Path(scratch_folder) if scratch_folder else None


class Nodes:
    """The nodes of a job whose number may change between two starts, a part of the context of a process.

    Attributes:
        fewest, most: the limits of the number of nodes; 0 and 0 if the number is fixed
        before: the number before this start; 0 at the first start
        fitting: the numbers of nodes that fit the arguments of the job; empty: unknown
    """

    def __init__(self, context: Context) -> None:
        fewest, _, most_nodes = os.environ.get(NODES, "").partition(":")
        self.fewest, self.most = int(fewest or 0), int(most_nodes or 0)
        self.here = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
        self.before = int(os.environ.get(NODES_BEFORE, "0"))
        self.fitting: tuple[int, ...] = ()


class HeldCopies:
    """The files of host copies that the agent of this process holds, a part of its context.

    Attributes:
        paths: of each rank the paths of its files; empty without files. The files of the rank's own worker
            come first, if the worker is on this node; then the files kept for other nodes
        only: whether this process is to write the copies to disk, and not to train
        has_keeper: whether the agent of another node keeps copies of the ranks of this node
    """

    def __init__(self, context: Context) -> None:
        held_paths = json.loads(os.environ.get(COPY_FILES) or "{}")
        self.paths: dict[int, tuple[str, ...]] = {
            int(rank): tuple(paths) for rank, paths in held_paths.items()
        }
        self.only = os.environ.get(ONLY_COPIES, "0") == "1"
        self.has_keeper = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1


class WorkerPlace:
    """The place of this process among the workers, from torch elastic; a part of its context.

    Attributes:
        rank: 0 outside of a job
    """

    def __init__(self, context: Context) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self.node = int(os.environ.get("GROUP_RANK", "0"))


def ending_signals() -> list[signal.Signals]:
    """Return the signals that end a job: `BY_HAND`, and the signals that torch handles."""
    names = [name.strip() for name in os.environ.get(HANDLED, "SIGHUP").split(",")]
    handled = [signal.Signals[name] for name in names if name in _NAMES]
    return list(dict.fromkeys([*BY_HAND, *handled]))


def stack_folder(log_path: str, generation: str) -> Path:
    """Return the folder of the stacks of a generation's first incident, with `rank<n>.txt` for each rank."""
    return Path(log_path).resolve() / f"stacks-{generation[:8]}"


def stack_folder_of(first_folder: Path, incident: int) -> Path:
    """Return the folder of the stacks of `incident`, from the folder of the generation's first incident."""
    return first_folder if incident <= 1 else first_folder.with_name(f"{first_folder.name}-{incident}")


def stack_scratch(place: Path, rank: int) -> Path:
    """Return the file in the agent's scratch folder for the stacks of a worker after `STACK_SIGNAL`."""
    return place / f"stacks-rank{rank}.txt"
