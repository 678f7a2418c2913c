"""Why nodes have not met, or torch would not start: its exceptions, in the words of its flags."""

from __future__ import annotations

import argparse

from torch.distributed import DistError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)

UNMET = (DistError, RendezvousError)
_TAKEN = "EADDRINUSE"


def why_not_again(error: Exception) -> str:
    """When the workers were to be started again."""
    return (
        "for too few came in time" if isinstance(error, RendezvousTimeoutError) else "for their store is lost"
    )


def why_not(error: Exception, parsed: argparse.Namespace) -> str:
    """One line.

    Args:
        error: what left `torch.distributed.run.run`.
        parsed: its flags, as it has completed them.
    """
    where = parsed.rdzv_endpoint or f"{parsed.master_addr}:{parsed.master_port}"
    match error:
        case DistError() if _TAKEN in str(error):
            return (
                f"the port of {where} is taken on this machine: another job has it, or what is left of one;"
                " choose another one (--master-port, or the port in --rdzv-endpoint)"
            )
        case DistError() | RendezvousConnectionError():
            return (
                f"no rendezvous answers at {where}: ttprun has to run on the node with that address, and this"
                " one has to reach it (--master-addr and --master-port, or --rdzv-endpoint)"
            )
        case RendezvousTimeoutError():
            return (
                f"--nnodes is {parsed.nnodes}: fewer nodes came to the rendezvous at {where} in time; ttprun"
                " has to run on each of them, with the same --rdzv-endpoint and --rdzv-id"
            )
    return f"torch does not start: {type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
