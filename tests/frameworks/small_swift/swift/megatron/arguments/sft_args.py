"""Arguments; with `add_version` each start has another output folder."""

from __future__ import annotations

import datetime
import os
from argparse import Namespace
from pathlib import Path

import torch


def add_version_to_work_dir(work_dir: str) -> str:
    versions = len(list(Path(work_dir).glob("v*")))
    names = [f"v{versions}-{datetime.datetime.now():%Y%m%d-%H%M%S-%f}"]
    torch.distributed.broadcast_object_list(names)
    return str(Path(work_dir) / names[0])


class MegatronSftArguments(Namespace):
    def _init_output_dir(self) -> None:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl")
        if self.add_version:
            self.output_dir = add_version_to_work_dir(self.output_dir)
        Path(self.output_dir).mkdir(parents=True, exist_ok=True)
