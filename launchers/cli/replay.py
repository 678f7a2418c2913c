"""`ttp replay`: runs a job again from a checkpoint, and compares its verified steps with a transcript.

The replay is another job, with save folder, log folder and transcript in a scratch folder. Verified steps are
compared while the job runs; the job ends at the first difference, or after the last step.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from adaptor import config
from adaptor.errors import ConfigError
from adaptor.launchers.cli import flags
from adaptor.protocol import naming
from adaptor.terminal import FINDING, OK, USAGE, Add, show
from adaptor.verification import transcript
from adaptor.verification.transcript import VerifiedStep

_LOOK_S = 0.5  # between two looks at the transcript: a small part of most steps
# Settings by which a replay would change something outside of its scratch folder.
_LEFT_OUT = ("TTP_STORE", "TTP_NOTIFY", "TTP_SERVE", "TTP_DUMP", "TTP_PROFILE")
# Options of a script that name a folder to write to, which is in the scratch folder in a replay; and options
# for which a replay has no such folder.
_PLACES = ("--tensorboard-dir", "--wandb-save-dir")
_REFUSED = ("--dataloader-save", "--non-persistent-save-interval")
_NEVER = str(10**9)


def add(add_command: Add) -> None:
    """Add the command to `ttp`."""
    parser = add_command(
        "replay", _answer, "run a job again from a checkpoint, and compare its steps with a transcript"
    )
    parser.add_argument(
        "--from", type=Path, required=True, dest="checkpoint", metavar="CHECKPOINT", help="a folder iter_N"
    )
    parser.add_argument("--to", type=int, required=True, metavar="STEP", help="the last step to compare")
    parser.add_argument(
        "--compare", type=Path, required=True, metavar="TRANSCRIPT", help=f"the {transcript.NAME} of the job"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- ttprun ..., the command of the job")


def _answer(parsed: argparse.Namespace) -> int:
    expected = _expected(parsed.checkpoint, parsed.to, parsed.compare)
    command = parsed.command[parsed.command[:1] == ["--"] :]
    with tempfile.TemporaryDirectory(prefix="ttp-replay-", ignore_cleanup_errors=True) as scratch:
        every = math.gcd(*expected)
        command = _command(command, parsed.checkpoint, every, Path(scratch))
        variables = {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)}
        with _running(command, variables) as process:
            return _compare(process, Path(scratch), expected)


def _expected(checkpoint: Path, to: int, path: Path) -> dict[int, VerifiedStep]:
    """Return the verified steps to compare, by number. Raises ConfigError or CheckpointError."""
    first = naming.step_of(checkpoint.name)
    if first is None or not checkpoint.is_dir():
        raise ConfigError(f"--from is {checkpoint}: it must be the folder of a checkpoint, iter_N")
    if to <= first:
        raise ConfigError(f"--to is {to}: it must be a step after the checkpoint, {first + 1} or later")
    steps = transcript.trained(transcript.TranscriptReader(path).read())
    expected = {step: steps[step] for step in sorted(steps) if first < step <= to}
    if not expected:
        verified_text = (
            f"its verified steps are {min(steps)} to {max(steps)}" if steps else "it has no verified step"
        )
        raise ConfigError(f"{path}: no step from {first + 1} to {to} is verified: {verified_text}")
    return expected


def _command(command: Sequence[str], checkpoint: Path, every: int, scratch: Path) -> list[str]:
    """Make the folders of the replay; return the command. Raises ConfigError."""
    from torch.distributed import run

    program = Path(command[0]).name if command else ""
    if program != "ttprun":
        raise ConfigError(
            f"the command begins with {program or 'nothing'}: name ttprun after --, which verifies steps"
        )
    own_arguments, parsed, arguments = flags.parts_of(command[1:])
    if run.parse_min_max_nnodes(parsed.nnodes)[1] > 1:
        raise ConfigError(f"--nnodes is {parsed.nnodes}: a job is replayed on one node")
    for option in _REFUSED:
        if flags.script_option(arguments, option) is not None:
            raise ConfigError(f"{option} is among the script's arguments: a replay would write there")
    if None in (flags.script_option(arguments, "--load"), flags.script_option(arguments, "--save")):
        raise ConfigError("the script has no --load and --save: only scripts with both can be replayed")
    load = scratch / "load"
    load.mkdir()
    (load / checkpoint.name).symlink_to(checkpoint.absolute())
    (load / naming.TRACKER).write_text(str(naming.step_of(checkpoint.name)))
    places = {"--load": load, "--save": scratch / "save"}
    places |= {name: scratch / name for name in _PLACES if flags.script_option(arguments, name) is not None}
    numbers = {"--save-interval": _NEVER, "--ckpt-step": str(naming.step_of(checkpoint.name))}
    options = {name: str(place) for name, place in places.items()} | {
        name: number for name, number in numbers.items() if flags.script_option(arguments, name) is not None
    }
    settings = {
        "TTP_VERIFY_EVERY": str(every),
        "TTP_TRANSCRIPT": "True",
        "TTP_CORRUPTION": "stop",
        "TTP_LOG_PATH": str(scratch / "logs"),
    }
    flag_of = {setting.variable: setting.flag for setting in config.settings()}
    left_out = {flag for name, flag in flag_of.items() if name.startswith(_LEFT_OUT)}
    kept = [pair for pair in own_arguments if pair[0].partition("=")[0] not in left_out]
    return [
        command[0],
        *(argument for pair in kept for argument in pair),
        *(f"{flag_of[name]}={value}" for name, value in settings.items()),
        *arguments,
        *(argument for pair in options.items() for argument in pair),
    ]


@contextlib.contextmanager
def _running(command: Sequence[str], variables: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run the replay, and end the replay after the block. Raises ConfigError: no such program."""
    try:
        process = subprocess.Popen(command, env=dict(variables))
    except OSError as error:
        raise ConfigError(f"{command[0]}: cannot be run ({error.strerror})") from error
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _compare(process: subprocess.Popen[bytes], scratch: Path, expected: Mapping[int, VerifiedStep]) -> int:
    reader: transcript.TranscriptReader | None = None
    equal: list[int] = []
    while True:
        code = process.poll()  # before the last look: what was written by then is read
        if reader is None:
            reader = next(map(transcript.TranscriptReader, scratch.glob(f"logs/*/{transcript.NAME}")), None)
        for replayed in [] if reader is None else reader.read():
            recorded = expected.get(replayed.step)
            if recorded is None:
                continue
            if reason := transcript.incomparable(recorded, replayed):
                raise ConfigError(f"step {recorded.step} cannot be compared: {reason}")
            versions = transcript.other_versions(recorded, replayed)
            note = f" (other versions: {versions})" if versions else ""
            texts = transcript.differences(recorded, replayed)
            if texts or not replayed.is_agreed:
                verified_text = f"step {equal[-1]} is equal" if equal else "no step before it was compared"
                show([f"verified step {recorded.step} differs; {verified_text}{note}", *texts])
                return FINDING
            equal.append(recorded.step)
            if len({*equal}) == len(expected):
                show([f"all {len(expected)} verified steps are equal: {equal[0]} to {equal[-1]}{note}"])
                return OK
        if code is not None:
            last = f"after step {equal[-1]}" if equal else "before a verified step"
            show(
                [f"the replay has ended {last}, with exit code {code}: step {max(expected)} was not reached"]
            )
            return USAGE
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_S)
