"""`python lora.py --rank R --targets NAME... [--adapter DIR] [--base DIR --note FILE]`: does LoRA fit?

A target in no layer, a rank other than the resumed adapter's, a base that is missing or was replaced: the
framework reports such mistakes late, in a traceback, or silently trains something else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

# What a layer of the framework's qwen3_spec has.
MODULES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def check_targets(targets: Sequence[str]) -> None:
    """Raise ValueError where a target is in no layer."""
    for target in targets:
        if target not in MODULES:
            raise ValueError(
                f"target module {target!r} is in no layer of Qwen3;"
                f" there are {', '.join(MODULES)} (LORA_TARGETS)"
            )


def check_rank(adapter: Path, rank: int) -> None:
    """Raise ValueError if the newest checkpoint in `adapter` has another rank."""
    if not (adapter / "latest_checkpointed_iteration.txt").is_file():
        return
    import checkpoints  # here, because it imports torch

    ranks = [
        tensor.shape[0]
        for name, tensor in checkpoints.model_of(adapter).items()
        if name.endswith("lora_A.default.weight")
    ]
    if not ranks:
        raise ValueError(f"{adapter} has a checkpoint without adapters: it is not LoRA's")
    if ranks[0] != rank:
        raise ValueError(f"the adapter in {adapter} has rank {ranks[0]}, LORA_R is {rank}")


def check_base(base: Path, note: Path) -> None:
    """Write path and hash of the base into `note`, or compare with an existing note. Raises ValueError."""
    import checkpoints

    digest = hashlib.sha256()
    for path in checkpoints.files(checkpoints.newest(base)):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    current = {"sha256": digest.hexdigest(), "base": str(base.resolve())}
    if not note.is_file():
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps(current))
        return
    noted = json.loads(note.read_text())
    for key, part in (("sha256", "content"), ("base", "folder")):
        if noted[key] != current[key]:
            raise ValueError(
                f"the base of the adapter has another {part}: {key} was {noted[key]}, is {current[key]};"
                " bring it back, or begin LoRA anew (flow.sh --from lora)"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Does LoRA fit its base?")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--targets", nargs="+", required=True)
    parser.add_argument("--adapter", type=Path, help="where LoRA saves")
    parser.add_argument("--base", type=Path)
    parser.add_argument("--note", type=Path, help="where path and hash of the base are kept")
    parsed = parser.parse_args()
    try:
        if parsed.rank < 1:
            raise ValueError(f"the rank is {parsed.rank}; say 1 or more (LORA_R)")
        check_targets(parsed.targets)
        if parsed.adapter is not None:
            check_rank(parsed.adapter, parsed.rank)
        if parsed.base is not None and parsed.note is not None:
            check_base(parsed.base, parsed.note)
    except (ValueError, OSError) as error:
        sys.exit(f"lora.py: {error}")
    print(f"LoRA of rank {parsed.rank} on {', '.join(parsed.targets)}")


if __name__ == "__main__":
    main()
