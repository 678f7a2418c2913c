"""Reads torch's flight recorder in a hang: the collectives begun by this rank.

torch keeps the newest collectives for each backend with a recorder. torch returns the records as JSON without
waiting for a collective. Everything here is for people: the save does not wait for the records.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from adaptor.protocol.collectives import Collectives, encode, newest

# For backends of the CPU, and for NCCL; present according to the build of torch.
_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def write(path: Path) -> str:
    """Write the records to `path`, and return the newest collective of each group for the controller.

    Returns:
        '' where nothing is recorded: by this torch, by these backends, or because the recorder is switched
        off.
    """
    dumps = list(_dumps())
    newest_collectives: Collectives = {}
    for dump in dumps:
        newest_collectives.update(newest(dump))
    if not newest_collectives:
        return ""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(json.dumps(dumps))
    return encode(str(path), newest_collectives)


def _dumps() -> Iterator[object]:
    from torch._C import _distributed_c10d  # a torch may be built without it

    for name in _RECORDERS:
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            yield json.loads(dump())
