"""Names of checkpoint folders and of the tracker file, as Megatron spells them, and further names of the
adaptor.

iter_0000012                         a complete checkpoint, and nothing else
iter_0000012_tmp_0f3a                last words being written by the generation 0f3a of workers
iter_0000012_tmp2.1_0f3a             the same by the controller of term 2, after the first agent was given up
iter_0000012_saving_0f3a             a regular save of the framework being written
iter_0000012_saving.taken_0f3a       the same on a disk of a node's own, during its rename to the final name
iter_0000012_saving.abandoned_0f3a   a save cut short by an incident, during its removal
iter_0000012_tmp.abandoned_0f3a      a former folder for last words, during its removal
aside_iter_0000012.1                 a former folder of the final name: incomplete, damaged or older
replaced_iter_0000012                a complete checkpoint while its newer version is moved in
reshape_iter_0000012                 the folder in which a job makes the checkpoint in other parallel sizes
before_reshape_iter_0000012.1        the checkpoint before the change of sizes; a person may remove the folder

A process that hangs with its disk may go on when the disk does, generations later: names of a generation keep
such a process from emptying or removing the folders of a later generation.

No name of ours that outlives a save starts with `iter_`: some tools parse the rest after the prefix as a
number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "ttp_manifest.json"
LAYOUT = "ttp_layout.json.gz"
MODEL_FILE = "model_optim_rng.pt"  # of a model-parallel rank, in the format torch
OPTIMIZER_FILE = "distrib_optim.pt"  # with a distributed optimizer
BASE = "ttp_base.json"  # in a model-parallel rank's folder of a checkpoint of adapters: their base model
LEASE = ".ttp_lease"  # names the job that saves in this folder
LOCK = f"{TRACKER}.lock"  # exists while a process names a checkpoint
UPLOADS = ".ttp_uploads"  # the folder of notes of uploads to a store that are not completed

_FINAL = re.compile(r"iter_([0-9]{7,18})")  # larger than any step counter of a framework
_TEMPORARY = re.compile(
    r"iter_[0-9]{7,18}_(?:tmp([0-9]{0,9})(?:\.[0-9]{1,9})?|saving(?:\.taken)?)"
    r"(?:\.abandoned[0-9]{0,9})?(_[0-9A-Za-z]+)?"
)
_GENERATION = 8  # the number of random letters and digits that distinguish generations
_RESHAPE = "reshape_"
_BEFORE_RESHAPE = re.compile(r"before_reshape_(iter_[0-9]{7,18})\.([0-9]{1,9})")
_REPLACED = re.compile(r"replaced_(iter_[0-9]{7,18})")


def final_name(step: int) -> str:
    """Return the folder of the complete checkpoint of `step`. Raises ValueError below 0."""
    if step < 0:
        raise ValueError(f"step is {step}; a checkpoint belongs to a step of 0 or more")
    return f"iter_{step:07d}"


def temporary_name(step: int, term: int = 0, number: int = 0, generation: str = "") -> str:
    """Return the folder for last words until they are published.

    Two controllers may be at work, one on each side of a cut network, with different terms; and two agents of
    one controller, if the disk of one hangs, with folders of different `number`.
    """
    return f"{final_name(step)}_tmp{term or ''}" + (f".{number}" if number else "") + _mark(generation)


def regular_name(step: int, generation: str = "") -> str:
    """Return the folder of a regular save of the framework until the save is complete."""
    return f"{final_name(step)}_saving{_mark(generation)}"


def taken_name(step: int, generation: str = "") -> str:
    """Return the name of a regular save on a disk of a node's own, during its rename to the final name."""
    return f"{final_name(step)}_saving.taken{_mark(generation)}"


def is_regular(name: str, generation: str) -> bool:
    """Return True if `name` is the folder of a regular save of this `generation`."""
    return is_of(name, generation) and name.endswith(f"_saving{_mark(generation)}")


def is_unfinished_save(name: str) -> bool:
    """Return True if `name` is the folder of a regular save without a final name."""
    match = _TEMPORARY.fullmatch(name)
    return match is not None and "_saving" in name and ".abandoned" not in name


def abandoned_name(name: str, number: int = 1) -> str:
    """Return the name under which the temporary folder `name` is removed; `number` counts from 1."""
    match = _TEMPORARY.fullmatch(name)
    mark = (match.group(2) or "") if match else ""
    return f"{name.removesuffix(mark)}.abandoned{number if number > 1 else ''}{mark}"


def _mark(generation: str) -> str:
    mark = re.sub("[^0-9A-Za-z]", "", generation)[:_GENERATION]
    return f"_{mark}" if mark else ""


def aside_name(step: int, number: int) -> str:
    """Return the name for an incomplete, damaged or older checkpoint that is moved away; `number` from 1."""
    return f"aside_{final_name(step)}.{number}"


def replaced_name(step: int) -> str:
    """Return the name of the older version of a checkpoint while the newer version is moved in."""
    return f"replaced_{final_name(step)}"


def reshape_name(step: int) -> str:
    """Return the folder in which a job makes the checkpoint of `step` in other parallel sizes."""
    return f"{_RESHAPE}{final_name(step)}"


def is_reshape(name: str) -> bool:
    """Return True if `name` is the folder in which a job makes a checkpoint in other parallel sizes."""
    return name.startswith(_RESHAPE) and step_of(name.removeprefix(_RESHAPE)) is not None


def before_reshape_name(step: int, number: int) -> str:
    """Return the name of a checkpoint that was replaced by one in other sizes; `number` from 1."""
    return f"before_reshape_{final_name(step)}.{number}"


def before_reshape(name: str) -> tuple[int, int] | None:
    """Return the step and the number in a name of `before_reshape_name`, None for any other name."""
    match = _BEFORE_RESHAPE.fullmatch(name)
    step = step_of(match.group(1)) if match else None
    return (step, int(match.group(2))) if match and step is not None else None


def is_temporary(name: str) -> bool:
    """Return True if `name` is a folder that only a live process may own."""
    return _TEMPORARY.fullmatch(name) is not None


def is_temporary_of(name: str, step: int, term: int, number: int) -> bool:
    """Return True if `name` is the `temporary_name` of the other arguments, in some generation."""
    temporary = temporary_name(step, term, number)
    return is_temporary(name) and (name == temporary or name.startswith(f"{temporary}_"))


def is_of(name: str, generation: str) -> bool:
    """Return True if `name` is a temporary folder of this `generation` of workers."""
    match = _TEMPORARY.fullmatch(name)
    return match is not None and (match.group(2) or "") == _mark(generation)


def term_of(name: str) -> int:
    """Return the term of the controller that ordered a temporary folder; 0 also for a regular save."""
    match = _TEMPORARY.fullmatch(name)
    return int(match.group(1) or 0) if match else 0


def step_of(name: str) -> int | None:
    """Return the step in the name of a complete checkpoint's folder, None for any other name.

    None also for `iter_00000015`: the folder of step 15 has seven digits, and no framework looks for another
    name.
    """
    match = _FINAL.fullmatch(name)
    step = int(match.group(1)) if match else -1
    return step if match and final_name(step) == name else None


def step_of_replaced(name: str) -> int | None:
    """Return the step in a `replaced_` folder name, None for any other name."""
    match = _REPLACED.fullmatch(name)
    return step_of(match.group(1)) if match else None


def model_parallel_folder(
    tensor_rank: int, pipeline_rank: int | None = None, expert_rank: int | None = None
) -> str:
    """Return Megatron's folder of a model-parallel rank; None for a rank whose size is 1."""
    name = f"mp_rank_{tensor_rank:02d}"
    if pipeline_rank is not None:
        name += f"_{pipeline_rank:03d}"
    if expert_rank is not None:
        name += f"_{expert_rank:03d}"
    return name


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint.

    Attributes:
        xxh3_128: in hexadecimal, of a file that was written front to back; else None
        attempt: the attempt that wrote the file, until it is published; None once the file has its name
        xxh3_128_blocks: of a large file, and of a file that several ranks have written in place: the xxh3-128
            of the xxh3-128 of its blocks of 1 MiB, in order (`hashing.BlockDigest`). With neither checksum
            only the size is known
        tracker: the name of a copy in the save folder, which names the step for the framework; None: no copy
    """

    path: str
    bytes: int
    xxh3_128: str | None
    attempt: int | None = None
    xxh3_128_blocks: str | None = None
    tracker: str | None = None

    @property
    def draft(self) -> str:
        """Return the path during the write; no two attempts write to the same path."""
        return self.path if self.attempt is None else f"{self.path}.{self.attempt}"
