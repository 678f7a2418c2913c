"""`ttp store list|pull|push|verify|prune URL`.

Exit codes: 0, success; 1, a checkpoint is damaged or missing; 2, bad usage, or the store refuses or does not
answer.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from adaptor import config, output, threads
from adaptor.checkpoint import tracker
from adaptor.errors import StoreError
from adaptor.protocol import naming
from adaptor.store import catalog
from adaptor.store.client import DamagedError, Store, open_store, open_waiting
from adaptor.store.settings import StoreSettings
from adaptor.store.store_requests import Retrying
from adaptor.terminal import FINDING, OK, Add
from adaptor.text import shown, size

_AT_ONCE = 8  # checkpoints whose state is asked for at the same time


class Row(msgspec.Struct):
    """A checkpoint in a store; a line for each problem."""

    step: int
    where: str
    state: str
    files: int
    bytes: int
    created: str
    problems: list[str]


def add(add_command: Add) -> None:
    """Add the command to `ttp`."""
    parser = add_command(
        "store", _answer, "checkpoints in an object store: list, pull, push, verify or prune them"
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(
        name: str, run: Callable[[argparse.Namespace], int], help_text: str
    ) -> argparse.ArgumentParser:
        subparser = actions.add_parser(name, allow_abbrev=False, help=help_text, description=help_text)
        subparser.set_defaults(run=run)
        subparser.add_argument(
            "url", metavar="URL", help="like s3://bucket/run7, obs://, gs://, az:// or file://"
        )
        return subparser

    action("list", _list, "the checkpoints that a store has, and whether they are complete")
    pull = action("pull", _pull, "bring the newest checkpoint that is intact into a save folder")
    push = action("push", _push, "write a checkpoint of a save folder to a store")
    for subparser in (pull, push):
        subparser.add_argument("folder", metavar="DIR", type=Path, help="the save folder (--save, --load)")
    pull.add_argument("--step", type=int, metavar="N", help="this step alone")
    push.add_argument("--step", type=int, metavar="N", help="the step; default: what the tracker names")
    verify = action("verify", _verify, "read the checkpoints of a store, and compare their checksums")
    verify.add_argument("--step", type=int, metavar="N", help="of this step alone")
    prune = action("prune", _prune, "remove all checkpoints but the newest ones")
    prune.add_argument("--keep", type=int, required=True, metavar="K", help="how many steps stay, from 1 on")
    prune.add_argument("--dry-run", action="store_true", help="say what would be removed")
    for subparser in actions.choices.values():
        subparser.add_argument("--json", action="store_true", help="print JSON")


def _answer(parsed: argparse.Namespace) -> int:
    run: Callable[[argparse.Namespace], int] = parsed.run
    step = getattr(parsed, "step", None)
    if step is not None and step < 0:
        raise StoreError(f"--step is {step}: it must be a number from 0 on")
    scheme, colon, place = str(getattr(parsed, "folder", "")).partition(
        ":/"
    )  # a Path keeps a single `/` of `//`
    if colon and "://" not in parsed.url:
        url = f"{scheme}://{'/' if scheme == 'file' else ''}{place}"
        raise StoreError(f"the URL comes first: ttp store {parsed.action} {shown(url)} {shown(parsed.url)}")
    try:
        return run(parsed)
    except KeyboardInterrupt:
        print("ttp store: interrupted; the same command goes on", file=sys.stderr)
        raise


def _open(parsed: argparse.Namespace) -> Store:
    return open_waiting(parsed.url, config.load().of(StoreSettings).store_endpoint, _say)


def _list(parsed: argparse.Namespace) -> int:
    store = open_store(
        parsed.url, config.load().of(StoreSettings).store_endpoint
    )  # without waiting: a user waits for the answer
    calls = [partial(_rows, store, step) for step in catalog.steps(store)]
    with contextlib.closing(threads.in_order(calls, "ttp-list", _AT_ONCE)) as coming:
        found_rows = [row for rows in coming for row in rows.result()]
    return _tell(parsed, store, found_rows)


def _rows(store: Store, step: int) -> list[Row]:
    complete, incomplete = catalog.places(store, step)
    problem = "not complete: it has no manifest, so an upload is at work or was cut short"
    return [_row(store, step, prefix) for prefix in complete] + [
        Row(step, prefix, "incomplete", 0, 0, "", [problem]) for prefix in incomplete
    ]


def _row(store: Store, step: int, prefix: str) -> Row:
    try:
        checkpoint = catalog.examine(store, prefix)
    except DamagedError as error:
        return Row(step, prefix, "damaged", 0, 0, "", [shown(str(error))])
    saved_manifest = checkpoint.saved_manifest
    return Row(
        step, prefix, "complete", len(saved_manifest.files), checkpoint.bytes, saved_manifest.created, []
    )


def _verify(parsed: argparse.Namespace) -> int:
    store = _open(parsed)
    available_steps = catalog.steps(store)
    if parsed.step is not None:
        if parsed.step not in available_steps:
            raise StoreError(f"{store}: there is no checkpoint of step {parsed.step} in it")
        available_steps = [parsed.step]
    return _tell(parsed, store, list(_verified(store, available_steps)))


def _verified(store: Store, steps: list[int]) -> Iterator[Row]:
    for row in (row for step in steps for row in _rows(store, step)):
        if row.state == "complete":
            row.problems = [
                shown(line) for line in catalog.wrong_files(store, catalog.examine(store, row.where))
            ]
            row.state = "damaged" if row.problems else "intact"
        yield row


def _tell(parsed: argparse.Namespace, store: Store, rows: list[Row]) -> int:
    if parsed.json:
        print(msgspec.json.encode({"store": str(store), "checkpoints": rows}).decode())
    else:
        for row in rows:
            details = f", {row.files} files, {size(row.bytes)}, {row.created}" if row.files else ""
            print(f"step {row.step}: {row.state}{details}  {row.where}")
            for problem in row.problems:
                print(f"  {problem}")
        print(f"{len(rows)} checkpoint{'' if len(rows) == 1 else 's'} in {store}")
    return FINDING if any(row.state == "damaged" for row in rows) else OK


def _push(parsed: argparse.Namespace) -> int:
    from adaptor.store.push import push

    root: Path = parsed.folder
    if not root.is_dir():
        raise StoreError(f"{shown(str(root))}: there is no such folder; name a --save folder")
    step = tracker.tracked_step(root) if parsed.step is None else parsed.step
    if step is None:
        raise StoreError(f"{shown(str(root))}: no tracker names a step in it; choose one with --step")
    if not tracker.has_manifest(root, step):
        folder = root / naming.final_name(step)
        summary = (
            f"has no {naming.MANIFEST}, as what is saved without the adaptor, and is not pushed"
            if folder.is_dir()
            else "there is no such checkpoint"
        )
        raise StoreError(f"{shown(str(folder))}: {summary}")
    store = open_store(
        parsed.url, config.load().of(StoreSettings).store_endpoint, make=True, retrying=Retrying(_say)
    )
    pushed = push(store, root, step, tell=_say)
    if parsed.json:
        print(msgspec.json.encode({"store": str(store), "step": step, **_fields(pushed)}).decode())
    elif pushed.there:
        print(f"step {step} is in {store} already: {pushed.where}")
    else:
        sent_now = f", of which {size(pushed.sent)} were sent now" if pushed.sent < pushed.bytes else ""
        summary = f"{pushed.files} files, {size(pushed.bytes)}{sent_now}"
        print(f"step {step} is in {store}: {pushed.where}, {summary}")
    return OK


def _pull(parsed: argparse.Namespace) -> int:
    from adaptor.store.pull import pull

    root: Path = parsed.folder
    if root.exists() and not root.is_dir():
        raise StoreError(f"{shown(str(root))}: is not a folder")
    store = _open(parsed)
    pulled = pull(store, root, parsed.step)
    for problem in pulled.problems:
        print(f"ttp store: damaged, so an older one is taken: {shown(problem)}", file=sys.stderr)
    if parsed.json:
        print(msgspec.json.encode({"store": str(store), **_fields(pulled)}).decode())
    elif pulled.there:
        print(f"step {pulled.step} is in {shown(str(root))} already")
    else:
        print(
            f"step {pulled.step} is in {shown(str(root))}: {size(pulled.bytes)} from {store}/{pulled.where}"
        )
    return OK


def _prune(parsed: argparse.Namespace) -> int:
    from adaptor.store.prune import prune

    store = _open(parsed)
    pruned = prune(store, parsed.keep, dry_run=parsed.dry_run)
    if parsed.json:
        print(
            msgspec.json.encode({"store": str(store), "dry_run": parsed.dry_run, **_fields(pruned)}).decode()
        )
    else:
        uploads = f" and {pruned.uploads} uploads that were cut short" if pruned.uploads else ""
        print(
            f"{store}: {_removed(pruned.removed, parsed.dry_run)} ({size(pruned.bytes)}){uploads},"
            f" complete and kept: {_numbers(pruned.kept)}"
        )
        if pruned.unlisted:
            _say(pruned.unlisted)
    return OK


def _say(line: str) -> None:
    output.tell(f"ttp store: {shown(line)}")  # a request goes on, whether or not anybody reads it


def _removed(steps: list[int], dry_run: bool) -> str:
    named = f"step{'s' * (len(steps) > 1)} {_numbers(steps)}" if steps else "no step"
    return f"{named} {'would be' if dry_run else 'are' if len(steps) > 1 else 'is'} removed"


def _numbers(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"


def _fields(report: object) -> dict[str, object]:
    return dict(vars(report))
