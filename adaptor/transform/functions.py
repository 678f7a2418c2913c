"""The functions of `python -m adaptor transform` and `layout merge`: a checkpoint in other parallel sizes.

No accelerator, no framework and no process group is needed; torch is not imported. A refusal raises an
`AdaptorError` whose text names the option by its flag.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from adaptor.checkpoint import disk, layout_file
from adaptor.checkpoint.layout_file import RankLayout
from adaptor.errors import CheckpointError, UnsupportedError
from adaptor.protocol import naming
from adaptor.transform.sizes import Rank, Sizes
from adaptor.transform.source import SourceCheckpoint, open_source
from adaptor.transform.target import TargetCheckpoint, by_rules, described_by

if TYPE_CHECKING:
    from typing_extensions import Unpack

FORMATS = ("torch", "torch_dist")
_SIZES = ("tp", "pp", "vpp", "ep", "etp", "dp")


class TransformOptions(TypedDict, total=False):
    """The target of a transform.

    Attributes:
        tp: tensor-parallel size; None, for each size: the size of the source
        pp: pipeline-parallel size
        vpp: chunks of each pipeline stage; None: 1
        ep: expert-parallel size
        etp: tensor-parallel size of experts
        dp: data-parallel size, for the stored arguments
        layout: the layout file of the target, as `ttprun --ttp-layout-only` writes it; None: rules lay it out
        format: `torch` (the default) or `torch_dist`
        step: the step to transform; None: the step that the tracker names
        vocab_size: the size of the tokenizer's vocabulary, where the source does not say the size
        weights_only: leave out the optimizer and the schedule of the learning rate, as for inference
    """

    tp: int | None
    pp: int | None
    vpp: int | None
    ep: int | None
    etp: int | None
    dp: int | None
    layout: str | Path | None
    format: str
    step: int | None
    vocab_size: int | None
    weights_only: bool


def transform_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    workers: int = 2,
    verify: bool = False,
    resume: bool = False,
    **options: Unpack[TransformOptions],
) -> Path:
    """Write a checkpoint of Megatron-LM in other parallel sizes.

    Args:
        source: the folder with `iter_*` and the tracker.
        target: the folder to write to; empty or missing.
        workers: the number of threads that write.
        verify: check the source by its checksums and all replicas, and the written target.
        resume: go on with an earlier interrupted call, or with the ranks of `transform_rank`.
        options: the target, see `TransformOptions`.

    Returns:
        The folder of the new checkpoint.

    Raises:
        CheckpointError: the source is damaged or incomplete, or the target cannot be written.
        UnsupportedError: the source or the target is of a kind that is not supported.
    """
    opened = open_target(source, target, options)
    return write(opened, Path(target), workers=workers, verify=verify, resume=resume)


def transform_rank(
    source: str | Path,
    target: str | Path,
    rank: str,
    *,
    verify: bool = False,
    **options: Unpack[TransformOptions],
) -> Path:
    """Write the files of one rank of the target; other ranks may be written at the same time.

    When all ranks are written, `transform_checkpoint` with `resume` gives the checkpoint its name.

    Args:
        source: the folder with `iter_*` and the tracker.
        target: the folder to write to, the same for all ranks.
        rank: `tp=1,pp=0`, with `ep=0` for experts; a missing number is 0.
        verify: check the source by its checksums and all replicas.
        options: the target, the same for all ranks.

    Returns:
        The folder with the files of the ranks.

    Raises:
        CheckpointError: as `transform_checkpoint`.
        UnsupportedError: as `transform_checkpoint`; or the target has no such rank.
    """
    opened = open_target(source, target, options)
    return write(opened, Path(target), rank_of("rank", rank, opened.sizes), verify=verify)


def ranks_needed(source: str | Path, rank: str, **options: Unpack[TransformOptions]) -> dict[str, list[Path]]:
    """Return the ranks of the source from which one rank of the target is made.

    No tensor is read. The transform of a rank also reads small files of the folder, and in the format `torch`
    the structure of the files of all ranks.

    Args:
        source: the folder with `iter_*` and the tracker.
        rank: of the target: `tp=1,pp=0`, with `ep=0` for experts.
        options: the target.

    Returns:
        For each rank of the source, as `tp=0,pp=1,ep=0`, the files with the needed parts.

    Raises:
        CheckpointError: as `transform_checkpoint`.
        UnsupportedError: as `transform_checkpoint`; or the target has no such rank.
    """
    opened = open_target(source, None, options)
    needs = opened.needs(rank_of("rank", rank, opened.sizes))
    return {str(source): sorted(needs[source]) for source in opened.source.sizes.ranks if source in needs}


def merge_layouts(folder: str | Path, out: str | Path) -> Path:
    """Join layout files of some ranks each, as of pipeline stages, to one file.

    Args:
        folder: the folder with the files `*.json.gz` and `*.json`, all of one job.
        out: the file to write, for the option `layout` of a transform.

    Returns:
        The written file.

    Raises:
        CheckpointError: a file is damaged, two files differ or are of two jobs, or a rank is missing.
    """
    join_layouts(Path(folder), Path(out))
    return Path(out)


def join_layouts(folder: Path, out: Path) -> list[RankLayout]:
    """Join the layout files in `folder` to the file `out`, and return the layouts of all ranks.

    Raises:
        CheckpointError: as `merge_layouts`.
    """
    _require_no_checkpoint(folder)
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith((".json.gz", ".json")))
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror or error}") from error
    if not paths:
        raise CheckpointError(f"{folder}: has no layout file, *.json.gz or *.json")
    layouts: dict[Rank, tuple[RankLayout, Path]] = {}
    for path in paths:
        for layout in layout_file.read_part(path):
            rank = Rank(layout.tp, layout.pp, layout.ep)
            previous, previous_path = layouts.setdefault(rank, (layout, path))
            if previous != layout:
                raise CheckpointError(f"{path}: says something else of {layout.folder} than {previous_path}")
            first, first_path = next(iter(layouts.values()))
            if not layout_file.is_of_one_job(first, layout):
                raise CheckpointError(
                    f"{path}: is of another job than {first_path}: other sizes or arguments"
                )
    ranks = [layouts[rank][0] for rank in sorted(layouts, key=lambda rank: (rank.pp, rank.ep, rank.tp))]
    layout_file.require_complete(ranks, folder)
    disk.replace(out.absolute().parent, out.name, layout_file.join(map(layout_file.encode, ranks)))
    return ranks


def _require_no_checkpoint(folder: Path) -> None:
    """Refuse a folder of a checkpoint or of checkpoints: their layout files have all ranks already."""
    folders = (folder, *sorted(folder.glob("iter_*")))
    checkpoints = [path for path in folders if (path / naming.MANIFEST).is_file()]
    layouts = [layout for path in checkpoints if (layout := path / naming.LAYOUT).is_file()]
    if layouts:
        raise CheckpointError(
            f"{folder}: has checkpoints, and {layouts[-1]} is the layout of all ranks, for transform"
            " --layout; merge is for layout files of some ranks each"
        )
    if checkpoints:
        raise CheckpointError(
            f"{folder}: has checkpoints without a layout file; ttprun --ttp-layout-only FILE writes one"
        )


def open_target(
    source: str | Path, target: str | Path | None, options: Mapping[str, Any]
) -> TargetCheckpoint:
    """Open the source, and return the target of the options; nothing is written.

    Args:
        source: the folder with `iter_*` and the tracker.
        target: the folder to write to; None: no folder.
        options: see `TransformOptions`.

    Raises:
        CheckpointError: as `transform_checkpoint`.
        UnsupportedError: as `transform_checkpoint`.
    """
    unknown = sorted(options.keys() - TransformOptions.__annotations__)
    if unknown:
        raise TypeError(f"{unknown[0]}: is no option of a transform")
    for name in (*_SIZES, "vocab_size"):
        _require_number(name, options.get(name), 1)
    step, format, layout = options.get("step"), options.get("format", FORMATS[0]), options.get("layout")
    _require_number("step", step, 0)
    if format not in FORMATS:
        raise UnsupportedError(f"--format is {format}: it must be {' or '.join(FORMATS)}")
    _require_places(Path(source), None if target is None else Path(target))
    opened = open_source(Path(source), step, weights_only=options.get("weights_only", False))
    sizes = {name: options.get(name) for name in _SIZES}
    if layout is not None:
        return described_by(opened, Path(layout), sizes, format)
    return by_rules(opened, _sizes(opened, sizes), format, options.get("vocab_size"))


def _require_number(name: str, value: Any, least: int) -> None:
    if value is not None and (type(value) is not int or value < least):
        flag = f"--{name.replace('_', '-')}"
        raise UnsupportedError(f"{flag} is {value}: it must be a number from {least} on")


def _sizes(source: SourceCheckpoint, options: Mapping[str, int | None]) -> Sizes:
    """Return the sizes of the target: the sizes in the options, else the sizes of the source."""
    source_sizes = source.sizes
    sizes = replace(
        source_sizes,
        tp=options["tp"] or source_sizes.tp,
        pp=options["pp"] or source_sizes.pp,
        vpp=options["vpp"] or 1,
        ep=options["ep"] or source_sizes.ep,
    )
    # Experts that were cut as all else still are.
    sizes = replace(
        sizes,
        etp=options["etp"] or (source_sizes.etp if source_sizes.expert_tensor != source_sizes.tp else None),
    )
    apart = sizes.expert_tensor * sizes.ep // sizes.tp
    return replace(sizes, dp=options["dp"] or max(source_sizes.dp, apart))


def write(
    target: TargetCheckpoint,
    root: Path,
    only_rank: Rank | None = None,
    *,
    workers: int = 2,
    verify: bool = False,
    resume: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the files of all ranks, and give the checkpoint its name; or the files of one rank alone.

    Args:
        target: the checkpoint to write.
        root: the folder to write to.
        only_rank: the rank whose files are written; None: all ranks.
        workers: the number of threads that write.
        verify: see `transform_checkpoint`.
        resume: see `transform_checkpoint`.
        say: receives lines about the progress.

    Returns:
        The folder of the checkpoint; of a single rank the folder that gets this name later.

    Raises:
        CheckpointError: the source is damaged, the target folder is not empty, or the disk refuses.
    """
    # Imported here: without numpy a dry run is quick.
    from adaptor.transform import copying, run
    from adaptor.transform.copying import Files

    source = target.source
    target.require_parts()
    ranks = target.sizes.ranks if only_rank is None else [only_rank]
    problems = run.defects(source.folder, checksums=verify)
    if problems:
        raise CheckpointError(problems[0])
    with Files() as files:
        copying.require_common(source, files)
        copying.require_replicas(source, files, everything=verify)
    folder = run.temporary_folder(root, source.step)
    _require_free(root, folder, go_on=resume or only_rank is not None)
    if not folder.exists():
        disk.require_room(root.resolve(), sum(target.bytes(rank) for rank in ranks), run.NEED)
    folder.mkdir(parents=True, exist_ok=True)
    order = run.TransformOrder(
        source.folder.parent,
        source.step,
        target.sizes,
        target.rows,
        folder,
        target.format,
        target.layout,
        source.weights_only,
    )
    files_by_rank = run.run(target, order, ranks, workers, say)
    if only_rank is not None:
        return folder
    run.finish(target, order, root, files_by_rank, verify=verify)
    return root / naming.final_name(source.step)


def _require_places(source: Path, target: Path | None) -> None:
    if not source.is_dir():
        raise CheckpointError(f"SRC {source}: there is no such folder")
    next(source.iterdir(), None)  # tells of a folder that may not be read
    if target is None:
        return
    if source.resolve() in (target.resolve(), *target.resolve().parents):
        raise CheckpointError(f"DST {target}: is inside SRC {source}; give a folder outside of it")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"DST {target}: is not a folder")


def _require_free(root: Path, folder: Path, *, go_on: bool) -> None:
    """Refuse a folder with anything but the files of an earlier run of the same transform."""
    present = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    strangers = [name for name in present if name != folder.name]
    if strangers:
        raise CheckpointError(
            f"DST {root}: is not empty, it has {strangers[0]}; give another folder, or empty it"
        )
    if present and not go_on:
        raise CheckpointError(
            f"DST {root}: has a transform that was interrupted; go on with --resume, or empty it"
        )


def rank_of(option: str, text: str, sizes: Sizes) -> Rank:
    """Return the rank of the target that a text such as `tp=1,pp=0` names.

    Args:
        option: the name of the option, for messages.
        text: the value of the option.
        sizes: of the target.

    Raises:
        UnsupportedError: the text names no rank of the target.
    """
    parts = [part.partition("=") for part in text.split(",")]
    numbers = {name: int(number) for name, _, number in parts if re.fullmatch(r"[0-9]{1,9}", number)}
    if len(numbers) != len(parts) or not numbers.keys() <= {"tp", "pp", "ep"}:
        raise UnsupportedError(f"{option} is {text!r}: it must be like tp=1,pp=0, with ep=0 for experts")
    rank = Rank(numbers.get("tp", 0), numbers.get("pp", 0), numbers.get("ep", 0))
    if rank not in sizes.ranks:
        raise UnsupportedError(f"{option} is {text}: the target has {sizes}, so there is no such rank")
    return rank
