"""Brings a node to a job that has lost its first rendezvous store, and has gone on at a new store.

The lease of the save folder names the new store. The node comes back after its loss, or comes for the first
time; its flags are the flags of the first start, and name the lost store.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch.distributed.elastic.rendezvous import utils

from adaptor import output
from adaptor.checkpoint import lease
from adaptor.launchers.cli import flags
from adaptor.launchers.rendezvous.rendezvous_errors import MovedError
from adaptor.launchers.rendezvous.waiting import wait_for
from adaptor.protocol.messages import Endpoint


class MovedJob:
    """The job of the flags, which may have moved to another store.

    Args:
        parsed: the flags, which `find` changes.
    """

    def __init__(self, parsed: argparse.Namespace) -> None:
        self._parsed = parsed
        save = flags.script_option(parsed.training_script_args, "--save")
        is_alone = parsed.standalone or parsed.nnodes.rpartition(":")[2].strip() == "1"
        # With fixed numbers only a job that may have spare nodes moves, and this node would be a spare node.
        may_move = flags.may_have_spares(parsed) if parsed.rdzv_backend == "static" else not is_alone
        self._lease = lease.StoreOfJob(Path(save)) if save and may_move else None
        self._goes_on = f"the job that saves in {save} goes on, without its first node 0, at"

    def find(self) -> None:
        """Let the flags name the store of a living job that has moved.

        With fixed numbers the node becomes a spare node: all places have been given away.
        """
        parsed, store_of_job = self._parsed, self._lease
        if store_of_job is None:
            return
        store = wait_for(store_of_job.find, lambda: "a sign of life of the job that saves in --save")
        if not store:
            return
        host, port = utils.parse_rendezvous_endpoint(store, -1)
        if parsed.rdzv_backend != "static":
            output.tell(f"[ttp] {self._goes_on} {store}: this node asks to be taken in there")
        elif not parsed.ttp_spare:
            output.tell(f"[ttp] {self._goes_on} {store}: this node waits there, as a spare node")
            parsed.ttp_spare = True
        go_to_store(parsed, Endpoint(host, port))

    def look(self) -> None:
        """Look into the lease while this node waits at the store of its flags.

        Raises:
            MovedError: the job has moved.
        """
        store = self._lease.look() if self._lease is not None else ""
        if store and store != flags.rendezvous_of(self._parsed):
            raise MovedError(f"{self._goes_on} {store}: start this command again, and the node comes there")


def go_to_store(parsed: argparse.Namespace, store: Endpoint) -> None:
    """Let the flags name the open `store`."""
    if parsed.rdzv_backend == "static":
        parsed.master_addr, parsed.master_port = store.address, store.port
    else:
        settings = utils._parse_rendezvous_config(parsed.rdzv_conf)
        parsed.rdzv_conf = ",".join(f"{name}={value}" for name, value in {**settings, "is_host": "0"}.items())
    if parsed.rdzv_backend != "static" or parsed.rdzv_endpoint:
        parsed.rdzv_endpoint = f"{store.address}:{store.port}"
