"""torch's rendezvous of workers: each start of the workers has the agent's store to itself.

The agent's store lives through a restart. Up to torch 2.3 clients of the store put the restart count before
their keys; since then a restarted worker can read the address of a dead worker, and its group never connects.

Other stores stay unchanged: a script may make a group with processes outside of the job, which do not know
the prefix.
"""

from __future__ import annotations

import os
from typing import Any

from adaptor import context, patching
from adaptor.protocol.environment import Generation

rendezvous = patching.Unit("rendezvous", framework="torch", tested=">=2.4,<3", group="worker")


@rendezvous.patch(
    "torch.distributed.rendezvous:_create_c10d_store",
    why="a restarted worker must not read the addresses of dead ones",
    accepts="(hostname, port, rank, world_size, timeout, use_libuv=)",
)
def each_start_has_keys_of_its_own(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from torch.distributed import PrefixStore

    store = wrapped(*args, **kwargs)
    port = args[1] if len(args) > 1 else kwargs["port"]
    if str(port) != os.environ.get("MASTER_PORT"):  # not by host: it has several names
        return store
    return PrefixStore(f"ttp/{context.part(Generation).name}", store)
