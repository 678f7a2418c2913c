"""`python -m adaptor layout merge DIR OUT`: layout files of some ranks each, as of stages, into one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from adaptor.checkpoint import disk, layout_file
from adaptor.checkpoint.layout_file import RankLayout
from adaptor.errors import AdaptorError, CheckpointError
from adaptor.protocol import naming

_ENDINGS = (".json.gz", ".json")


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of `python -m adaptor`."""
    parser = commands.add_parser("layout", allow_abbrev=False, help="layout files of checkpoints")
    actions = parser.add_subparsers(dest="action", required=True)
    merge = actions.add_parser(
        "merge", allow_abbrev=False, help="join layout files of some ranks each, as of pipeline stages"
    )
    merge.add_argument(
        "folder", metavar="DIR", type=Path, help="the folder with the files *.json.gz or *.json"
    )
    merge.add_argument("out", metavar="OUT", type=Path, help="the file to write, for transform --layout")


def main(parsed: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The exit code: 0, 2 for what is refused or fails.
    """
    try:
        layout = merge(parsed.folder, parsed.out)
    except AdaptorError as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"{error.filename or parsed.out}: {error.strerror or error}")
    sizes = " ".join(f"{name.upper()}{size}" for name, size in layout[0].sizes.items())
    print(f"{parsed.out}: the layout of {len(layout)} ranks is written ({sizes})")
    return 0


def _failed(reason: str) -> int:
    print(f"python -m adaptor layout: {reason}", file=sys.stderr)
    return 2


def _require_no_checkpoint(folder: Path) -> None:
    """Refuse a checkpoint, or a folder of checkpoints: their layout files have all ranks.

    Raises:
        CheckpointError: it is one; names the layout file that it has.
    """
    places = (folder, *sorted(folder.glob("iter_*")))
    found = [place for place in places if (place / naming.MANIFEST).is_file()]
    whole = [path for place in found if (path := place / naming.LAYOUT).is_file()]
    if whole:
        raise CheckpointError(
            f"{folder}: has checkpoints, and {whole[-1]} is the layout of all ranks, for transform --layout;"
            " merge is for layout files of some ranks each"
        )
    if found:
        raise CheckpointError(
            f"{folder}: has checkpoints without a layout file; ttprun --ttp-layout-only FILE writes one"
        )


def merge(folder: Path, out: Path) -> list[RankLayout]:
    """Join the layout files in a folder to the file `out`; return the layouts of all ranks.

    Raises:
        CheckpointError: the folder is a checkpoint, there is no layout file, one is damaged, two say
            different things of a rank or are of two jobs, or a rank is missing.
    """
    _require_no_checkpoint(folder)
    try:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(_ENDINGS))
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror or error}") from error
    if not paths:
        raise CheckpointError(f"{folder}: has no layout file, *.json.gz or *.json")
    found: dict[tuple[int, int, int], tuple[RankLayout, Path]] = {}
    for path in paths:
        for one in layout_file.read_part(path):
            known, where = found.setdefault((one.pp, one.ep, one.tp), (one, path))
            if known != one:
                raise CheckpointError(f"{path}: says something else of {one.folder} than {where}")
            first, origin = next(iter(found.values()))
            if not layout_file.is_of_one_job(first, one):
                raise CheckpointError(f"{path}: is of another job than {origin}: other sizes or arguments")
    ranks = [one for _, (one, _) in sorted(found.items(), key=lambda item: item[0])]
    layout_file.require_complete(ranks, folder)
    disk.replace(out.absolute().parent, out.name, layout_file.join(map(layout_file.encode, ranks)))
    return ranks
