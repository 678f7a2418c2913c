"""`ttp verify`: compares the checkpoints in a save folder with their manifests."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence, Set
from functools import partial
from pathlib import Path

import msgspec

from adaptor import threads
from adaptor.checkpoint import manifest, resume_selection, tracker
from adaptor.errors import CheckpointError
from adaptor.operations import job_reader
from adaptor.protocol import naming
from adaptor.protocol.naming import FileEntry
from adaptor.terminal import FINDING, OK, USAGE, Add, show
from adaptor.text import shown
from adaptor.verification import agreed_state

_MOST_AT_ONCE = 16  # files; beyond that a disk is no faster


class _CheckedFile(msgspec.Struct):
    """A file of a checkpoint: ok, unhashed (its size is right), missing, changed or unreadable."""

    path: str
    bytes: int
    state: str


class _Checkpoint(msgspec.Struct):
    """The findings about a checkpoint; a line for each problem.

    Attributes:
        complete: whether all files exist
        bytes: whether the files have the written content
        trained: the agreement of the holders on the written state
    """

    step: int
    state: str
    problems: list[str]
    files: list[_CheckedFile]
    complete: str = "not known"
    bytes: str = "not known"
    trained: str = agreed_state.NONE


def add(add_command: Add) -> None:
    """Add the command to `ttp`."""
    parser = add_command("verify", _answer, "compare the checkpoints in a save folder with their manifests")
    parser.add_argument("save", type=Path, help="the folder (--save)")
    parser.add_argument("--step", type=int, help="of this step alone")
    parser.add_argument(
        "--files", action="store_true", help="a line for each file, also for those that are intact"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _answer(parsed: argparse.Namespace) -> int:
    """Compare the checkpoints; return 0, 1 if a file is damaged or missing, 2 if unknown.

    Raises JobFolderError if the folder, or the step, is missing.
    """
    root: Path = parsed.save
    try:
        is_there, steps = root.is_dir(), tracker.steps(root)
    except OSError as error:
        raise job_reader.JobFolderError(f"{shown(str(root))}: {error.strerror or error}") from error
    if not is_there:
        raise job_reader.JobFolderError(f"{shown(str(root))}: there is no such folder; name a --save folder")
    if naming.step_of(root.resolve().name) is not None and not steps:
        raise job_reader.JobFolderError(
            f"{shown(str(root))}: a checkpoint; name its --save folder, and --step"
        )
    if parsed.step is not None:
        if parsed.step not in steps:
            raise job_reader.JobFolderError(
                f"{shown(str(root))}: there is no checkpoint of step {parsed.step}"
            )
        steps = [parsed.step]
    named = tracker.tracked_step(root)
    answers = [_verified(root, step) for step in steps]
    wrong = "" if parsed.step is not None else _tracker_problem(root, steps, named)
    if parsed.json:
        answer_body = {"save": shown(str(root)), "tracker": named, "checkpoints": answers}
        print(msgspec.json.encode(answer_body).decode())
    else:
        if answers:
            show(_table(answers, named, all_files=parsed.files))
        if wrong:
            show([wrong])
        show([f"{len(answers)} checkpoint{'' if len(answers) == 1 else 's'} in {shown(str(root))}"])
    states = {checkpoint_answer.state for checkpoint_answer in answers}
    if wrong or "damaged" in states:
        return FINDING
    return USAGE if "unreadable" in states else OK


def _tracker_problem(root: Path, steps: Sequence[int], named: int | None) -> str:
    """Return why the tracker, which names the step `named`, names no checkpoint of `steps`; "" if it does."""
    if named is not None:
        return "" if named in steps else f"the tracker names step {named}, of which there is no folder"
    text = tracker.tracker_text(root)
    if text == resume_selection.RELEASE:
        return ""
    if text:
        return f"the tracker {naming.TRACKER} names no step: {shown(text)}"
    return f"the tracker {naming.TRACKER} is missing" if steps else "no checkpoint has been saved here"


def _verified(root: Path, step: int) -> _Checkpoint:
    folder = root / naming.final_name(step)
    if not tracker.has_manifest(root, step):
        reason = "it has no manifest: the framework wrote it without the adaptor, and nobody can tell"
        return _Checkpoint(step, "not known", [reason], [])
    try:
        described = manifest.read(folder)
    except manifest.UnreadableError as error:
        return _Checkpoint(step, "unreadable", [shown(str(error))], [])
    except CheckpointError as error:
        return _Checkpoint(step, "damaged", [shown(str(error))], [])
    problems = []
    if described.step != step:
        problems.append(f"{folder / naming.MANIFEST}: is not that of step {step}")
    elif not described.files:
        problems.append(f"{folder / naming.MANIFEST}: names no file")
    examined = _examined(folder, described.files)
    states = {examined_file.state for examined_file in examined}
    problems += [shown(examined_file.problem) for examined_file in examined if examined_file.problem]
    files = [
        _CheckedFile(shown(examined_file.entry.path), examined_file.entry.bytes, examined_file.state)
        for examined_file in examined
    ]
    if states & {"missing", "changed"} or (problems and "unreadable" not in states):
        state = "damaged"
    elif "unreadable" in states:
        state = "unreadable"
    else:
        state = "intact" if states == {"ok"} else "sizes are right"
    return _Checkpoint(
        step,
        state,
        problems,
        files,
        _complete(states, len(files)),
        _bytes(states),
        shown(agreed_state.described(described.state)),
    )


def _complete(states: Set[str], count: int) -> str:
    if "missing" in states or not count:
        return "no"
    return "not known" if "unreadable" in states else f"yes, {count} file{'s' if count > 1 else ''}"


def _bytes(states: Set[str]) -> str:
    if states & {"missing", "changed"}:
        return "no"
    if not states or "unreadable" in states:
        return "not known"
    return "as written" if states == {"ok"} else "sizes as written; not all files have a checksum"


def _examined(folder: Path, files: Sequence[FileEntry]) -> list[manifest.Examined]:
    """Examine files, several at the same time; return the findings, in the order of the files."""
    calls = (partial(manifest.examine, folder, entry) for entry in files)
    at_once = min(_MOST_AT_ONCE, 2 * (os.cpu_count() or 1))
    return [examined.result() for examined in threads.in_order(calls, "ttp-verify", at_once)]


def _table(answers: Sequence[_Checkpoint], named: int | None, *, all_files: bool) -> list[str]:
    """Return a line for each checkpoint, and below it a line for each defective file."""
    lines = []
    for checkpoint_answer in answers:
        mark = " (the tracker names it)" if checkpoint_answer.step == named else ""
        size = sum(file.bytes for file in checkpoint_answer.files)
        count = (
            f", {len(checkpoint_answer.files)} files, {size / 1e9:.3f} GB" if checkpoint_answer.files else ""
        )
        lines.append(f"step {checkpoint_answer.step}: {checkpoint_answer.state}{mark}{count}")
        lines += [
            f"  {file.state:<10}  {file.bytes:>15}  {file.path}"
            for file in checkpoint_answer.files
            if all_files or file.state not in ("ok", "unhashed")
        ]
        lines += [f"  {problem}" for problem in checkpoint_answer.problems]
        if checkpoint_answer.state != "not known":
            lines += [
                f"  complete    {checkpoint_answer.complete}",
                f"  bytes       {checkpoint_answer.bytes}",
                f"  state       {checkpoint_answer.trained}",
            ]
    return lines
