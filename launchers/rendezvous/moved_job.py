"""Brings a node to a job that has lost its first rendezvous store, and has gone on at another one.

The lease of the save folder names that store. The node was lost and comes back, or comes for the first time,
with the flags of the first start, which name the lost store.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch.distributed.elastic.rendezvous import utils

from adaptor import output
from adaptor.checkpoint import lease
from adaptor.launchers.cli import flags
from adaptor.launchers.rendezvous.waiting import wait_for
from adaptor.protocol.messages import Endpoint


def find(parsed: argparse.Namespace) -> None:
    """Let the flags name the rendezvous store of a living job with the same --save, if that has another one.

    With fixed numbers the node becomes a spare node: all places have been given away.
    """
    save = flags.script_option(parsed.training_script_args, "--save")
    if not save or parsed.standalone or parsed.nnodes.rpartition(":")[2].strip() == "1":
        return
    root = Path(save)
    store = wait_for(lambda: lease.store_of_living_job(root), lambda: f"a sign of life of the job in {root}")
    if not store:
        return
    host, port = utils.parse_rendezvous_endpoint(store, -1)
    where = f"the job in {root} goes on at {store}, without its first node 0"
    if parsed.rdzv_backend != "static":
        output.tell(f"[ttp] {where}: this node asks to be taken in there")
    elif not parsed.ttp_spare:
        output.tell(f"[ttp] {where}: this node waits there, as a spare node")
        parsed.ttp_spare = True
    go_to_store(parsed, Endpoint(host, port))


def go_to_store(parsed: argparse.Namespace, store: Endpoint) -> None:
    """Let the flags name `store`, which is open."""
    if parsed.rdzv_backend == "static":
        parsed.master_addr, parsed.master_port = store.address, store.port
    else:
        settings = utils._parse_rendezvous_config(parsed.rdzv_conf)
        parsed.rdzv_conf = ",".join(f"{name}={value}" for name, value in {**settings, "is_host": "0"}.items())
    if parsed.rdzv_backend != "static" or parsed.rdzv_endpoint:
        parsed.rdzv_endpoint = f"{store.address}:{store.port}"
