"""Explains why nodes have not met, or why torch does not start, in terms of the flags."""

from __future__ import annotations

import argparse

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

from adaptor import text

UNMET = (DistError, RendezvousError)
_TAKEN = "EADDRINUSE"


def lacks_means(error: Exception) -> bool:
    """Return whether the machine has no process, thread, descriptor or room left to start anything."""
    if isinstance(error, UNMET):
        return False
    return isinstance(error, OSError) or "can't start new thread" in text.say(error)


def why_not_again(error: Exception) -> str:
    """Return why the workers could not be started again, as the end of a sentence."""
    return (
        "for too few came in time" if isinstance(error, RendezvousTimeoutError) else "for their store is lost"
    )


def why_not(error: Exception, parsed: argparse.Namespace) -> str:
    """Return why the job could not start, in one line with the flags to change.

    Args:
        error: the exception of `torch.distributed.run.run`.
        parsed: its flags, as it has completed them.
    """
    where = parsed.rdzv_endpoint or f"{parsed.master_addr}:{parsed.master_port}"
    match error:
        case RuntimeError() if _TAKEN in str(error):  # of torch 2.4 it is no DistError
            return (
                f"the port of {where} is taken on this machine: another job has it, or what is left of one;"
                " choose another one (--master-port, or the port in --rdzv-endpoint)"
            )
        case DistError() | RendezvousConnectionError():
            return (
                f"no rendezvous answers at {where}: ttprun has to run on the node with that address, and this"
                " one has to reach it (--master-addr and --master-port, or --rdzv-endpoint)"
            )
        case RendezvousTimeoutError() if parsed.rdzv_backend == "static":
            return (
                f"{error} did not come to {where} in time; ttprun has to run on each node, with the same"
                " --nnodes, --master-addr and --master-port, and a --node-rank of its own"
            )
        case RendezvousTimeoutError():
            return (
                f"--nnodes is {parsed.nnodes}: fewer nodes came to the rendezvous at {where} in time; ttprun"
                " has to run on each of them, with the same --rdzv-endpoint and --rdzv-id"
            )
    return f"torch does not start: {type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
