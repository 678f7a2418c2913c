"""`python -m adaptor transform SRC DST --tp 4 --pp 2`: a checkpoint in other parallel sizes."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

from adaptor.errors import AdaptorError, UnsupportedError
from adaptor.transform import functions
from adaptor.transform.sizes import Rank
from adaptor.transform.target import TargetCheckpoint


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands `transform` and `layout` to `python -m adaptor`."""
    _add_layout(commands)
    parser = commands.add_parser(
        "transform",
        allow_abbrev=False,
        help="write a checkpoint of Megatron-LM in other parallel sizes",
    )
    parser.set_defaults(answer=main)
    parser.add_argument("source", metavar="SRC", type=Path, help="the folder with iter_* and the tracker")
    parser.add_argument("target", metavar="DST", type=Path, help="the folder to write to; empty or not there")
    for name, description in (
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
            help=f"{description}; default: that of SRC" if name != "vpp" else description,
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
        "--format", choices=functions.FORMATS, default="torch", help="of the target (default torch)"
    )
    parser.add_argument(
        "--weights-only", action="store_true", help="leave out the optimizer, as for inference"
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


def _add_layout(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("layout", allow_abbrev=False, help="layout files of checkpoints")
    parser.set_defaults(answer=main_layout)
    actions = parser.add_subparsers(dest="action", required=True)
    merge = actions.add_parser(
        "merge", allow_abbrev=False, help="join layout files of some ranks each, as of pipeline stages"
    )
    merge.add_argument(
        "folder", metavar="DIR", type=Path, help="the folder with the files *.json.gz or *.json"
    )
    merge.add_argument("out", metavar="OUT", type=Path, help="the file to write, for transform --layout")


class _Terminated(KeyboardInterrupt):
    """SIGTERM came."""


def main(parsed: argparse.Namespace) -> int:
    """Run the command `transform`.

    Returns:
        The exit code: 0, 2 after a refusal or failure, 128 + N after signal N.
    """
    previous_handler = signal.signal(signal.SIGTERM, _terminate)
    try:
        _run(parsed)
    except AdaptorError as error:
        return _failed(str(error))
    except OSError as error:
        location = error.filename or "a file or folder that it does not name"
        return _failed(f"{location}: {error.strerror or error}")
    except MemoryError as error:
        details = f" ({error})" if str(error) else ""
        return _failed(
            f"there is not enough memory{details}; fewer --workers, or one --rank at a time, need less"
        )
    except KeyboardInterrupt as error:
        number = signal.SIGTERM if isinstance(error, _Terminated) else signal.SIGINT
        return _failed("interrupted; the same command with --resume goes on", code=128 + number)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
    return 0


def _terminate(*_: object) -> NoReturn:
    raise _Terminated


def _failed(reason: str, command: str = "transform", code: int = 2) -> int:
    print(f"python -m adaptor {command}: {reason}", file=sys.stderr)
    return code


def _run(parsed: argparse.Namespace) -> None:
    if parsed.workers < 1:
        raise UnsupportedError(f"--workers is {parsed.workers}: it must be a number from 1 on")
    options = {name: getattr(parsed, name) for name in functions.TransformOptions.__annotations__}
    target = functions.open_target(parsed.source, parsed.target, options)
    source, all_ranks = target.source, target.sizes.ranks
    if parsed.needs is not None:
        needs = target.needs(functions.rank_of("--needs", parsed.needs, target.sizes))
        for path in sorted(set[Path]().union(*needs.values())):
            print(path.relative_to(source.folder).as_posix())
        return
    chosen = functions.rank_of("--rank", parsed.rank, target.sizes) if parsed.rank is not None else None
    ranks = all_ranks if chosen is None else [chosen]
    target.require_parts()
    total = sum(target.bytes(rank) for rank in ranks)
    without = ", without optimizer" if source.weights_only else ""
    print(
        f"step {source.step}: {source.sizes} to {target.sizes}{without},"
        f" {len(ranks)} of {len(all_ranks)} ranks, {total / 1e9:.3f} GB"
    )
    if target.rows != source.model.rows:
        moments = "" if source.weights_only else "; moments of new rows are zero"
        print(f"vocabulary: {source.model.rows} rows with padding, now {target.rows}{moments}")
    if parsed.dry_run:
        for rank in ranks:
            size, files = target.bytes(rank) / 1e9, len(set[Path]().union(*target.needs(rank).values()))
            print(f"{target.sizes.folder(rank)}: {size:.3f} GB from {files} files")
        return
    _write(parsed, target, chosen)


def _write(parsed: argparse.Namespace, target: TargetCheckpoint, rank: Rank | None) -> None:
    # Imported here: a dry run is quick without numpy.
    from adaptor.transform import copying, run

    written = functions.write(
        target,
        parsed.target,
        rank,
        workers=parsed.workers,
        verify=parsed.verify,
        resume=parsed.resume,
        say=run.say,
    )
    if rank is not None:
        print(
            f"{written / target.sizes.folder(rank)}: written; when all ranks are, the same command with"
            " --resume and without --rank gives the checkpoint its name"
        )
        return
    if line := copying.line(target.source, target.sizes):
        print(line)
    print(f"{written}: written{', and verified' if parsed.verify else ''}")


def main_layout(parsed: argparse.Namespace) -> int:
    """Run the command `layout`.

    Returns:
        The exit code: 0, 2 after a refusal or failure.
    """
    try:
        layout = functions.join_layouts(parsed.folder, parsed.out)
    except AdaptorError as error:
        return _failed(str(error), "layout")
    except OSError as error:
        return _failed(f"{error.filename or parsed.out}: {error.strerror or error}", "layout")
    sizes = " ".join(f"{name.upper()}{size}" for name, size in layout[0].sizes.items())
    print(f"{parsed.out}: the layout of {len(layout)} ranks is written ({sizes})")
    return 0
