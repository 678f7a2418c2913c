"""The base of adapters: with `--lora-ckpt-filter` a checkpoint contains adapters alone, and names the adapted
model.

Each model-parallel rank has in its folder of a checkpoint, beside the framework's files, a note of its
model's base file: path, size and checksum. A job that loads such a checkpoint takes the adapters, the
optimizer and all counters from the checkpoint, and the rest of the model from the base. (The framework's own
way, `--load BASE --lora-load SAVE`, reads the shards of the distributed optimizer from BASE.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from adaptor import context
from adaptor.checkpoint import disk, hashing, tracker
from adaptor.checkpoint.resume_selection import RELEASE
from adaptor.context import Context
from adaptor.errors import ResumeError
from adaptor.protocol.naming import BASE

_LARGEST = 1 << 20  # bytes of a note


class Note(msgspec.Struct, frozen=True):
    """The base checkpoint of a model-parallel rank.

    Attributes:
        load: the folder of checkpoints, absolute
        file: of this rank, below it
        size: in bytes
    """

    load: str
    file: str
    size: int
    xxh3_128: str

    def encode(self) -> bytes:
        """Return the note as JSON."""
        return (json.dumps(msgspec.to_builtins(self), indent=1) + "\n").encode()


class AdapterBase:
    """The base of this process's adapters, a part of its context.

    Attributes:
        note: of its model-parallel rank; None where checkpoints have the whole model, or nothing is loaded
            yet
        pending: the folder whose checkpoint lacks what the base has, until that was added
    """

    def __init__(self, context: Context) -> None:
        self.note: Note | None = None
        self.writes = False
        self.pending: Path | None = None

    def files(self) -> Mapping[str, bytes]:
        """Return the further files of this rank's folder of a checkpoint, by name."""
        return {} if self.note is None else {BASE: self.note.encode()}


def is_filtered(args: Any) -> bool:
    """Return whether checkpoints have adapters alone: MindSpeed-LLM filters those of the format `torch`."""
    return (
        bool(getattr(args, "lora_ckpt_filter", False))
        and bool(getattr(args, "lora_target_modules", None))
        and getattr(args, "ckpt_format", "torch") == "torch"
        and not getattr(args, "use_dist_ckpt", False)
    )


def is_kept(name: str) -> bool:
    """Return whether the framework's filter keeps an entry of the model (`filter_lora_keys`)."""
    return "lora" in name.lower()


def settle(load: Path, save: Path) -> None:
    """Determine the base of the model, and check that the adapters in `load` were trained on the same base.

    All ranks call the function at the same time, before loading from `load`; a single rank of each
    model-parallel rank reads its file of the base.

    Args:
        load: the folder to load from: the base, or a save of a job with the same base.
        save: the save folder of this job.

    Raises:
        ResumeError: the base is missing or has changed, or saves would go into the base's folder; on every
            rank.
    """
    import torch.distributed as dist

    from adaptor.replica.group import gather_values

    base = context.part(AdapterBase)
    file = _file_of(load)
    groups = gather_values(file.parent.name if file is not None else "")
    group = groups[dist.get_rank()]
    base.writes = groups.index(group) == dist.get_rank()
    gathered = gather_values(_examine(load, save, file) if base.writes else ("", None, False))
    for problem, _, _ in gathered:
        if problem:
            raise ResumeError(problem)
    _, base.note, has_note = gathered[groups.index(group)]
    base.pending = load if has_note else None


def require_added() -> None:
    """Check that the loaded adapters have their base. Raises ResumeError."""
    pending = context.part(AdapterBase).pending
    if pending is not None:
        raise ResumeError(
            f"{pending} has adapters alone, and this version of the framework does not let the adaptor add "
            "their base: load a checkpoint of the whole model"
        )


def load_with_base(wrapped: Any, args: Any, kwargs: Any) -> Any:
    """Load as the framework does, and add what the base has: the wrapper of `_load_base_checkpoint`."""
    loaded = wrapped(*args, **kwargs)
    adapter_base = context.part(AdapterBase)
    folder = args[0] if args else kwargs.get("load_dir")
    if (
        adapter_base.pending is None
        or adapter_base.note is None
        or folder is None
        or Path(folder) != adapter_base.pending
    ):
        return loaded
    if args:
        base = wrapped(adapter_base.note.load, *args[1:], **kwargs)
    else:
        base = wrapped(**{**kwargs, "load_dir": adapter_base.note.load})
    if loaded[0] is None or base[0] is None:
        return loaded
    for key, value in base[0].items():
        if key == "model" or key.removeprefix("model").isdigit():
            loaded[0][key] = {**value, **loaded[0].get(key, {})}
    adapter_base.pending = None
    return loaded


def write_beside(save: str, iteration: int) -> None:
    """Write the note into this rank's folder of a regular save, at the begin of the framework's writes."""
    base = context.part(AdapterBase)
    if base.note is None or not base.writes:
        return
    from megatron.training.checkpointing import get_checkpoint_name

    path = Path(get_checkpoint_name(save, iteration)).parent / BASE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(base.note.encode())


def _file_of(load: Path) -> Path | None:
    """Return this rank's model file of the checkpoint named by the tracker of `load`.

    The framework's own `read_metadata` is collective, and this function may be called on a single rank.
    """
    from megatron.training.checkpointing import get_checkpoint_name

    text = tracker.tracker_text(load)
    if text == RELEASE:
        return Path(get_checkpoint_name(str(load), 0, True))
    step = tracker.tracked_step(load)
    return None if step is None else Path(get_checkpoint_name(str(load), step, False))


def _examine(load: Path, save: Path, file: Path | None) -> tuple[str, Note | None, bool]:
    """Return the problem, the note, and whether the checkpoint in `load` has a note; never raise."""
    try:
        if file is None:
            return (
                f"--load {load} has no checkpoint, and --lora-ckpt-filter needs the base there",
                None,
                False,
            )
        if not (file.parent / BASE).exists():
            if load.resolve() == save.resolve():
                problem = (
                    f"--load and --save are both {load}, which has the base of the adapters: with"
                    " --lora-ckpt-filter its tracker would name adapters from the first save on, and no"
                    " restart would find the base; name another folder as --save"
                )
                return problem, None, False
            return "", _described(load, file), False
        note = msgspec.json.decode(disk.read(file.parent / BASE, _LARGEST), type=Note)
        return _wrong_with(note, file.parent), note, True
    except Exception as error:  # the other ranks wait for the answer
        return f"the base of adapters, {file}, cannot be read ({error})", None, False


def _described(load: Path, file: Path) -> Note:
    """Return the note of a file below `load`; the checkpoint's folder may be a link to another place."""
    return Note(
        str(load.resolve()), file.relative_to(load).as_posix(), file.stat().st_size, hashing.hash_file(file)
    )


def _wrong_with(note: Note, folder: Path) -> str:
    """Return why the base of the adapters in `folder` cannot be loaded; empty if loadable."""
    base = f"the adapters in {folder} were trained on {note.load}/{note.file}"
    load = Path(note.load)
    file = _file_of(load)
    if file is None or not (load / note.file).is_file():
        return f"{base}, which is gone: put it back"
    if file.resolve() != (load / note.file).resolve():
        return f"{base}, and the tracker there names another checkpoint now: let it name that one"
    if _described(load, file) != note:
        return f"{base}, which has changed: put back that of {note.size} bytes, checksum {note.xxh3_128}"
    return ""
