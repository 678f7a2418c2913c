"""Opens the checkpoint to transform: finds its step, and checks that all files are of one job and step."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adaptor.checkpoint import layout_file, tracker
from adaptor.checkpoint.layout_file import JobLayout
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.protocol.naming import MODEL_FILE, OPTIMIZER_FILE
from adaptor.transform import archive, arguments, contents, described
from adaptor.transform.contents import ByParam
from adaptor.transform.sharded_source import COMMON, ShardedCheckpoint, is_sharded
from adaptor.transform.sizes import Rank, Sizes
from adaptor.transform.source import SourceCheckpoint


def find(root: Path, step: int | None) -> tuple[Path, int]:
    """Return the folder of a step and the step: `step`, else the step that the tracker names.

    Raises:
        CheckpointError: the folder is missing.
    """
    if step is None:
        step = tracker.tracked_step(root)
        if step is None:
            raise CheckpointError(f"{root / naming.TRACKER}: names no step; give --step N")
    folder = root / naming.final_name(step)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such checkpoint")
    return folder, step


def sizes_at(root: Path, step: int) -> Sizes:
    """Return the parallel sizes with which the checkpoint of `step` below `root` was saved.

    Only the arguments in one file are read: the other content is not checked.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        UnsupportedError: the checkpoint has no arguments.
    """
    folder, _ = find(root, step)
    path = folder / COMMON if is_sharded(folder) else _model_files(folder)[0]
    if not path.is_file():
        raise CheckpointError(f"{path}: missing")
    return Sizes.of(arguments.of(archive.read(path), path))


def _model_files(folder: Path) -> list[Path]:
    """Return the files of the ranks' models. Raises CheckpointError if the folder has none."""
    ranks = sorted(path / MODEL_FILE for path in folder.iterdir() if path.name.startswith("mp_rank_"))
    model_files = [path for path in ranks if path.is_file()]
    if not model_files:
        raise CheckpointError(
            f"{folder}: has no mp_rank_*/{MODEL_FILE}, so it is no checkpoint of the format torch"
        )
    return model_files


def open_source(root: Path, step: int | None, *, weights_only: bool = False) -> SourceCheckpoint:
    """Open the checkpoint of `step` below `root`; no tensor is read.

    Args:
        root: the folder with the checkpoints and the tracker.
        step: None: the step that the tracker names.
        weights_only: leave out the optimizer; the checkpoint need not have one.

    Raises:
        CheckpointError: a rank is missing, ranks are of different steps, a file is damaged.
        UnsupportedError: its kind is not supported.
    """
    folder, number = find(root, step)
    if is_sharded(folder):
        return _open_sharded(folder, number, weights_only)
    first = _model_files(folder)
    args = arguments.of(archive.read(first[0]), first[0])
    layout = layout_file.read(path) if (path := folder / naming.LAYOUT).exists() else None
    arguments.require_supported(args, folder, described=layout is not None, weights_only=weights_only)
    sizes = Sizes.of(args)
    if layout is not None:
        _require_sizes(layout, sizes, folder)
    optimizers = 0 if weights_only else _optimizers(args, sizes)
    bodies: dict[Rank, dict[str, Any]] = {}
    states: dict[Rank, Sequence[dict[Any, Any] | ByParam | None]] = {}
    for rank in sizes.ranks:
        path = folder / sizes.folder(rank)
        if not (path / MODEL_FILE).is_file():
            raise CheckpointError(
                f"{path / MODEL_FILE}: missing; the arguments say {sizes}, {len(sizes.ranks)} ranks"
            )
        body = archive.read(path / MODEL_FILE)
        if not isinstance(body, dict) or body.get("iteration") != number:
            raise CheckpointError(f"{path / MODEL_FILE}: is not of step {number}{_other_step(body)}")
        sizes_of_file = Sizes.of(arguments.of(body, path / MODEL_FILE))
        if sizes_of_file != sizes:
            raise CheckpointError(
                f"{path / MODEL_FILE}: was saved with {sizes_of_file}, {first[0]} with {sizes}"
            )
        contents.require_model_file(body, path / MODEL_FILE, optimizers)
        bodies[rank] = body
        if weights_only:
            for key in contents.OF_OPTIMIZER:
                body.pop(key, None)
            continue
        if not (path / OPTIMIZER_FILE).is_file():
            raise CheckpointError(f"{path / OPTIMIZER_FILE}: missing; {contents.WITHOUT_OPTIMIZER}")
        content = archive.read(path / OPTIMIZER_FILE)
        states[rank] = contents.optimizer_states(content, path / OPTIMIZER_FILE, optimizers)
    return SourceCheckpoint(folder, number, sizes, args, bodies, states, layout, weights_only)


def _open_sharded(folder: Path, number: int, weights_only: bool) -> SourceCheckpoint:
    sharded = ShardedCheckpoint(folder, number, weights_only=weights_only)
    args, sizes, layout = sharded.args, sharded.sizes, sharded.layout
    arguments.require_supported(args, folder, described=True, weights_only=weights_only)
    _require_sizes(layout, sizes, folder)
    bodies = {rank: sharded.body(rank) for rank in sizes.ranks}
    for body in bodies.values():
        contents.require_model_file(body, folder, 0 if weights_only else _optimizers(args, sizes))
    states = {} if weights_only else {rank: sharded.states(rank) for rank in sizes.ranks}
    return SourceCheckpoint(folder, number, sizes, args, bodies, states, layout, weights_only)


def _optimizers(args: Namespace, sizes: Sizes) -> int:
    return 2 if getattr(args, "num_experts", None) and sizes.ep > 1 else 1


def _require_sizes(layout: JobLayout, sizes: Sizes, folder: Path) -> None:
    sizes_of_layout = described.sizes_of(layout)
    if sizes_of_layout != sizes:
        raise CheckpointError(
            f"{folder / naming.LAYOUT}: is of {sizes_of_layout}, and the arguments of {folder} say {sizes}"
        )


def _other_step(body: Any) -> str:
    step = body.get("iteration") if isinstance(body, dict) else None
    return f", but of step {step}" if isinstance(step, int) else ""
