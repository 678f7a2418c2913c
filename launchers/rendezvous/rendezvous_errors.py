"""Explains why nodes have not met, or why torch does not start, in terms of the flags."""

from __future__ import annotations

import argparse

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import utils
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from adaptor import text
from adaptor.errors import ConfigError
from adaptor.launchers.cli import flags

UNMET = (DistError, RendezvousError)
_TAKEN = "EADDRINUSE"
# torch's limits of waits for other nodes, by the key of --rdzv-conf: with --node-rank and without.
_TIMEOUTS_S = {"timeout": 900, "join_timeout": 600}


class NotTakenInError(RendezvousError):
    """The job for which the node waited has ended."""


class MovedError(NotTakenInError):
    """The job has gone on at another rendezvous store while the node waited at the store of its flags."""


class HostUnknownError(RendezvousConnectionError):
    """The host of the rendezvous has no address on the node."""


def plain_node(adaptor_node: str, plain: str) -> ConfigError:
    """Return the refusal of a job with a node, `plain`, that runs without the adaptor."""
    return ConfigError(
        f"the nodes of this job differ: ENABLE_TTP is True on {adaptor_node}, and {plain} runs plain"
        " torchrun, as with ENABLE_TTP=False; give all nodes the same"
    )


def lacks_means(error: Exception) -> bool:
    """Return whether the machine has no process, thread, descriptor or room left."""
    if isinstance(error, UNMET):
        return False
    return isinstance(error, OSError) or "can't start new thread" in text.say(error)


def no_restart_reason(error: Exception, parsed: argparse.Namespace) -> str:
    """Return why the workers could not be started again, as the end of a sentence.

    Args:
        error: the exception of `torch.distributed.run.run`.
        parsed: the flags of the run.
    """
    if isinstance(error, RendezvousTimeoutError):
        return f"for too few came {_in_time(parsed)}"
    return "for their store is lost"


def _in_time(parsed: argparse.Namespace) -> str:
    """Return how long nodes wait for each other, with the setting."""
    name = "timeout" if parsed.rdzv_backend == "static" else "join_timeout"
    seconds = utils._parse_rendezvous_config(parsed.rdzv_conf).get(name, _TIMEOUTS_S[name])
    return f"within {seconds} s (--rdzv-conf {name})"


def no_start_reason(error: Exception, parsed: argparse.Namespace) -> str:
    """Return why the job could not start, in one line with the flags to change.

    Args:
        error: the exception of `torch.distributed.run.run`.
        parsed: the flags of the run, as torch has completed them.
    """
    endpoint = flags.rendezvous_of(parsed)
    match error:
        case RuntimeError() if _TAKEN in str(error):  # of torch 2.4 it is no DistError
            return (
                f"the port of {endpoint} is taken on this machine: another job has it, or what is left of "
                "one;"
                " choose another one (--master-port, or the port in --rdzv-endpoint)"
            )
        case RendezvousClosedError():
            return (
                f"the rendezvous at {endpoint} was closed before the job began: another node has ended, "
                "and its"
                " last line says why"
            )
        case HostUnknownError():
            return (
                f"the host name {str(error)!r} does not resolve on this node: correct --master-addr or"
                " --rdzv-endpoint, give an address there, or add the name to /etc/hosts or the DNS"
            )
        case DistError() | RendezvousConnectionError() if parsed.nnodes.rpartition(":")[2].strip() == "1":
            return (
                f"this node does not reach its own rendezvous store at {endpoint}: {text.describe(error)}; "
                "with"
                " one node, leave out --master-addr and --rdzv-endpoint"
            )
        case DistError() | RendezvousConnectionError():
            return (
                f"no rendezvous answers at {endpoint}: ttprun has to run on the node with that address, "
                "and this"
                " one has to reach it (--master-addr and --master-port, or --rdzv-endpoint)"
            )
        case RendezvousTimeoutError() if parsed.rdzv_backend == "static":
            return (
                f"{error} did not come to {endpoint} {_in_time(parsed)}; ttprun has to run on each node, with"
                " the same --nnodes, --master-addr and --master-port, and a --node-rank of its own"
            )
        case RendezvousTimeoutError():
            return (
                f"--nnodes is {parsed.nnodes}: fewer nodes came to the rendezvous at {endpoint}"
                f" {_in_time(parsed)}; ttprun has to run on each of them, with the same --rdzv-endpoint and"
                " --rdzv-id"
            )
    return f"torch does not start: {type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
