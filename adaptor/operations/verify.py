"""`ttp verify`: the checkpoints in a save folder against their manifests."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from adaptor.checkpoint import manifest, saved_steps, tracker
from adaptor.operations import job_folder
from adaptor.operations.words import FINDING, OK, shown
from adaptor.protocol import naming


def answer(parsed: argparse.Namespace) -> int:
    """Compare the checkpoints in a save folder with their manifests; return the exit code."""
    root: Path = parsed.save
    if not root.is_dir():
        raise job_folder.JobFolderError(f"{shown(str(root))}: there is no such folder; name a --save folder")
    steps = saved_steps.steps(root)
    if parsed.step is not None:
        if parsed.step not in steps:
            raise job_folder.JobFolderError(
                f"{shown(str(root))}: there is no checkpoint of step {parsed.step}"
            )
        steps = [parsed.step]
    named = tracker.tracked_step(root)
    answers = [_verified(root, step) for step in steps]
    bad = any(answer.state == "damaged" for answer in answers)
    missing = named is not None and parsed.step is None and named not in steps
    if parsed.json:
        print(
            msgspec.json.encode({"save": shown(str(root)), "tracker": named, "checkpoints": answers}).decode()
        )
        return FINDING if bad or missing else OK
    for answer in answers:
        mark = " (the tracker names it)" if answer.step == named else ""
        print(f"step {answer.step}: {answer.state}{mark}")
        for problem in answer.problems:
            print(f"  {shown(problem)}")
    if missing:
        print(f"the tracker names step {named}, of which there is no folder")
    print(f"{len(answers)} checkpoint{'' if len(answers) == 1 else 's'} in {shown(str(root))}")
    return FINDING if bad or missing else OK


class _Checkpoint(msgspec.Struct):
    """What is known of a checkpoint; a line for each problem."""

    step: int
    state: str
    problems: list[str]


def _verified(root: Path, step: int) -> _Checkpoint:
    folder = root / naming.final_name(step)
    if not saved_steps.has_manifest(root, step):
        why = "it has no manifest: the framework wrote it without the adaptor, and nobody can tell"
        return _Checkpoint(step, "not known", [why])
    problems = [shown(problem) for problem in manifest.defects(folder, step=step)]
    return _Checkpoint(step, "damaged" if problems else "intact", problems)
