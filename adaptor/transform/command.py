"""`python -m adaptor transform SRC DST --tp 4 --pp 2`: a checkpoint in other parallel sizes."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from adaptor.errors import AdaptorError, CheckpointError, UnsupportedError
from adaptor.protocol import naming
from adaptor.transform import targets
from adaptor.transform.opening import open_source
from adaptor.transform.sizes import Rank, Sizes
from adaptor.transform.source import SourceCheckpoint
from adaptor.transform.target import TargetCheckpoint


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of `python -m adaptor`."""
    parser = commands.add_parser(
        "transform",
        allow_abbrev=False,
        help="write a checkpoint of Megatron-LM in other parallel sizes, with its optimizer",
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="the folder with iter_* and the tracker")
    parser.add_argument("target", metavar="DST", type=Path, help="the folder to write to; empty or not there")
    for name, what in (
        ("tp", "tensor-parallel size"),
        ("pp", "pipeline-parallel size"),
        ("vpp", "chunks of each pipeline stage (default 1)"),
        ("ep", "expert-parallel size"),
        ("dp", "data-parallel size, for the arguments that are stored"),
    ):
        parser.add_argument(
            f"--{name}",
            type=int,
            metavar="N",
            help=f"{what}; default: that of SRC" if name != "vpp" else what,
        )
    parser.add_argument(
        "--layout",
        metavar="FILE",
        type=Path,
        help="the layout of the target, as `ttprun --ttp-layout-only FILE` writes it; default: by rules",
    )
    parser.add_argument(
        "--etp",
        type=int,
        metavar="N",
        help="tensor-parallel size of experts; default: that of SRC where it is not --tp, else --tp",
    )
    parser.add_argument(
        "--format", choices=("torch", "torch_dist"), default="torch", help="of the target (default torch)"
    )
    parser.add_argument("--step", type=int, metavar="N", help="the step; default: what the tracker names")
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="of the tokenizer, where SRC does not say it"
    )
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="threads that write (default 2)")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written; no tensor is read")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check SRC by its checksums and all replicas, and DST when it is written",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with an earlier run that was interrupted"
    )
    parser.add_argument(
        "--rank", metavar="tp=N,pp=N", help="write this rank alone; --resume without --rank ends the work"
    )
    parser.add_argument(
        "--needs", metavar="tp=N,pp=N", help="print the files of SRC that a rank is made from"
    )


class _Terminated(KeyboardInterrupt):
    """SIGTERM came."""


def main(parsed: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit code: 0, 2 for what is refused or fails, 128 + N after signal N.
    """
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        _run(parsed)
    except AdaptorError as error:
        return _failed(str(error))
    except OSError as error:
        where = error.filename or "a file or folder that it does not name"
        return _failed(f"{where}: {error.strerror or error}")
    except MemoryError as error:
        more = f" ({error})" if str(error) else ""
        return _failed(
            f"there is not enough memory{more}; fewer --workers, or one --rank at a time, need less"
        )
    except KeyboardInterrupt as error:
        number = signal.SIGTERM if isinstance(error, _Terminated) else signal.SIGINT
        return _failed("interrupted; the same command with --resume goes on", 128 + number)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _terminate(*_: object) -> NoReturn:
    raise _Terminated


def _failed(why: str, code: int = 2) -> int:
    print(f"python -m adaptor transform: {why}", file=sys.stderr)
    return code


def _run(parsed: argparse.Namespace) -> None:
    for name in ("tp", "pp", "vpp", "ep", "etp", "dp", "workers", "vocab_size"):
        value = getattr(parsed, name)
        if value is not None and value < 1:
            raise UnsupportedError(f"--{name.replace('_', '-')} is {value}: it must be a number from 1 on")
    if parsed.step is not None and parsed.step < 0:
        raise UnsupportedError(f"--step is {parsed.step}: it must be a number from 0 on")
    _require_places(parsed.source, parsed.target)
    source = open_source(parsed.source, parsed.step)
    target = _target(source, parsed)
    if parsed.needs is not None:
        rank = _rank("--needs", parsed.needs, target.sizes)
        for path in target.needs(rank):
            print(path.relative_to(source.folder).as_posix())
        return
    ranks = [_rank("--rank", parsed.rank, target.sizes)] if parsed.rank is not None else target.sizes.ranks
    target.require_parts()
    total = sum(target.bytes(rank) for rank in ranks)
    print(
        f"step {source.step}: {source.sizes} to {target.sizes},"
        f" {len(ranks)} of {len(target.sizes.ranks)} ranks, {total / 1e9:.3f} GB"
    )
    if target.rows != source.model.rows:
        print(
            f"vocabulary: {source.model.rows} rows with padding, now {target.rows};"
            " moments of new rows are zero"
        )
    if parsed.dry_run:
        for rank in ranks:
            size, files = target.bytes(rank) / 1e9, len(target.needs(rank))
            print(f"{target.sizes.folder(rank)}: {size:.3f} GB from {files} files")
        return
    _write(parsed, target, ranks)


def _target(source: SourceCheckpoint, parsed: argparse.Namespace) -> TargetCheckpoint:
    given = {name: getattr(parsed, name) for name in ("tp", "pp", "vpp", "ep", "etp", "dp")}
    if parsed.layout is not None:
        return targets.described_by(source, parsed.layout, given, parsed.format)
    sizes = replace(
        source.sizes,
        tp=parsed.tp or source.sizes.tp,
        pp=parsed.pp or source.sizes.pp,
        vpp=parsed.vpp or 1,
        ep=parsed.ep or source.sizes.ep,
    )
    # Where it was that of all else, it still is.
    kept = source.sizes.etp if source.sizes.expert_tensor != source.sizes.tp else None
    sizes = replace(sizes, etp=parsed.etp or kept)
    apart = sizes.expert_tensor * sizes.ep // sizes.tp
    sizes = replace(sizes, dp=parsed.dp or max(source.sizes.dp, apart))
    return targets.by_rules(source, sizes, parsed.format, parsed.vocab_size)


def _write(parsed: argparse.Namespace, target: TargetCheckpoint, ranks: list[Rank]) -> None:
    # Imported here: a dry run is quick without numpy.
    from adaptor.transform import agreement, random_states, run
    from adaptor.transform.copying import Files

    source, root = target.source, parsed.target
    problems = run.defects(source.folder, checksums=parsed.verify)
    if problems:
        raise CheckpointError(problems[0])
    with Files() as files:
        agreement.require_common(source, files)
        agreement.require_replicas(source, files, everything=parsed.verify)
    folder = run.temporary_folder(root, source.step)
    _require_free(root, folder, go_on=parsed.resume or parsed.rank is not None)
    if not folder.exists():
        run.require_room(root.resolve(), sum(target.bytes(rank) for rank in ranks))
    folder.mkdir(parents=True, exist_ok=True)
    order = run.TransformOrder(
        parsed.source, source.step, target.sizes, target.rows, folder, parsed.format, target.layout
    )
    done = run.run(target, order, ranks, parsed.workers, run.say)
    if parsed.rank is not None:
        print(
            f"{folder / target.sizes.folder(ranks[0])}: written; when all ranks are, the same command with"
            " --resume and without --rank gives the checkpoint its name"
        )
        return
    run.finish(target, order, root, done, verify=parsed.verify)
    final = root / naming.final_name(source.step)
    line = random_states.line(source, target.sizes)
    if line:
        print(line)
    print(f"{final}: written{', and verified' if parsed.verify else ''}")


def _require_places(source: Path, target: Path) -> None:
    if not source.is_dir():
        raise CheckpointError(f"SRC {source}: there is no such folder")
    next(source.iterdir(), None)  # tells of a folder that may not be read
    ours, theirs = target.resolve(), source.resolve()
    if ours == theirs or theirs in ours.parents:
        raise CheckpointError(f"DST {target}: is inside SRC {source}; give a folder outside of it")
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"DST {target}: is not a folder")


def _require_free(root: Path, folder: Path, *, go_on: bool) -> None:
    """Refuse a folder that has anything but what an earlier run of the same transform has left."""
    there = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    others = [name for name in there if name != folder.name]
    if others:
        raise CheckpointError(
            f"DST {root}: is not empty, it has {others[0]}; give another folder, or empty it"
        )
    if there and not go_on:
        raise CheckpointError(
            f"DST {root}: has a transform that was interrupted; go on with --resume, or empty it"
        )


def _rank(option: str, text: str, sizes: Sizes) -> Rank:
    parts = [part.partition("=") for part in text.split(",")]
    given = {name: int(number) for name, _, number in parts if re.fullmatch(r"[0-9]{1,9}", number)}
    if len(given) != len(parts) or not given.keys() <= {"tp", "pp", "ep"}:
        raise UnsupportedError(f"{option} is {text!r}: it must be like tp=1,pp=0, with ep=0 for experts")
    rank = Rank(given.get("tp", 0), given.get("pp", 0), given.get("ep", 0))
    if rank not in sizes.ranks:
        raise UnsupportedError(f"{option} is {text}: the target has {sizes}, so there is no such rank")
    return rank
