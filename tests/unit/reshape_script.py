"""A rank of a job with other tensor parallel sizes than its checkpoint: `STORE RANK SIZE SAVE [DIES AFTER]`.

Rank DIES is killed before it writes, once the save folder has the file AFTER. A rank that is refused prints
the reason.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from adaptor.errors import ResumeError
from adaptor.frameworks import reshape
from adaptor.transform import run
from tests import waiting
from tests.unit.small_checkpoint import job_arguments

write_rank = run.write_rank


def main() -> None:
    store, rank, size, save, *dies = sys.argv[1:]

    def write(*args: Any) -> Any:
        if dies and rank == dies[0]:
            waiting.written(Path(save), (Path(save) / dies[1]).exists, "the others have written")
            os.kill(os.getpid(), signal.SIGKILL)
        return write_rank(*args)

    run.write_rank = write
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, int(size)), rank=int(rank), world_size=int(size)
    )
    try:
        reshape.bring_to_sizes(job_arguments(Path(save), tp=int(size)), (int(rank), 0, 0))
    except ResumeError as error:
        print(f"refused: {error}", flush=True)
    dist.destroy_process_group()


main()
