"""One rank of a job that resumes several times: `STORE RANK SIZE LOAD SAVE [LOAD SAVE ...]`.

Prints a line of JSON for each resume: the files that this rank has read, and the reason if it was refused.
The code in the file SETUP runs first; it may make the disk of a node fail. With OF_FRAMEWORK the folder is
chosen as for Megatron-LM and printed.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from argparse import Namespace
from pathlib import Path

import torch.distributed as dist

from adaptor.checkpoint import hashing, resume_check
from adaptor.errors import ResumeError
from adaptor.frameworks import megatron_restart

hash_file, block_digests = hashing.hash_file, hashing.block_digests
read: list[str] = []


def hash_and_note(path: Path) -> str:
    read.append(path.parent.name + "/" + path.name)
    return hash_file(path)


def blocks_and_note(path: Path, first: int, end: int, threads: int = 1) -> bytes:
    if first < end:
        read.append(f"{path.parent.name}/{path.name}:{first}-{end}")
    return block_digests(path, first, end, threads)


def main() -> None:
    store, rank, size, *folders = sys.argv[1:]
    hashing.hash_file = hash_and_note
    hashing.block_digests = blocks_and_note
    if setup := os.environ.get("SETUP"):
        runpy.run_path(setup)
    is_of_framework = "OF_FRAMEWORK" in os.environ
    loads = tuple(os.environ.get("LOADS", "").split())
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, int(size)), rank=int(rank), world_size=int(size)
    )
    for load, save in zip(folders[::2], folders[1::2], strict=True):
        read.clear()
        refused = ""
        args = Namespace(rank=int(rank), load=load, save=save, finetune=False, ckpt_step=None)

        def check() -> None:
            resume_check.require_intact(Path(args.load), Path(args.save), loads=loads)  # noqa: B023

        try:
            if is_of_framework:  # which parses its arguments, and later loads
                megatron_restart.resume_after_restart(args)
                megatron_restart.settle(args, check, lambda: None)
            else:
                check()
        except ResumeError as error:
            refused = str(error)
        print("=" + json.dumps({"read": read, "refused": refused, "load": args.load}))
    dist.destroy_process_group()


main()
