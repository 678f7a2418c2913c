"""Runs a script until its arguments are known, for `python -m adaptor report`, in place of training.

The script runs in this process as rank 0 of a job, until its framework has parsed and validated the arguments
(`adaptor.patches.report_arguments`), or until the first process group or optimizer. No other process takes
part, and nothing is written to the save folder.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from adaptor import _script, context, patching
from adaptor.context import Context
from adaptor.errors import AdaptorError
from adaptor.protection_plan import COPY, ModelSize, ParallelLayout, plan
from adaptor.protocol.records import ProtectionPlan
from adaptor.replica import tolerance
from adaptor.replica.choice import LONE_EXPERTS, ReplicaChoice
from adaptor.worker.unprotected import UnprotectedTraining

# Ranks of one copy of the model, and of one copy of its experts, are the products of these.
_MODEL = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
_EXPERTS = ("expert-tensor-parallel-size", "expert-model-parallel-size", "pipeline-model-parallel-size")


class Stop(BaseException):
    """The report needs no more of the script."""


class BadArguments(Stop):
    """The framework's parser does not take the arguments."""


@dataclass
class Findings:
    """The findings of the report about a script.

    Args:
        refusals: why the job would be refused, one line each.
        unprotected: why the script would train unprotected; '' if protected, or unknown.
        error: how the script ended before its protection was known.
        layout: None where no framework has parsed the arguments.
        model: None if its sizes are unknown.
        replica: `split`, `mirror`, `whole` (every rank has all) or `none`; '' if unknown.
        not_online: why a fault restarts all ranks, a line for each reason; empty: faults are recovered
            online; None where the options do not tell.
    """

    refusals: list[str] = field(default_factory=list)
    unprotected: str = ""
    error: str = ""
    layout: ParallelLayout | None = None
    model: ModelSize | None = None
    replica: str = ""
    not_online: list[str] | None = None

    def plan(self, ranks_per_node: int | None, racks: Sequence[str] = ()) -> ProtectionPlan | None:
        """Return the gains and costs of protection, None if the layout is unknown.

        Args:
            ranks_per_node: None: all ranks are on one node.
            racks: the rack of each node; empty: not known.
        """
        layout = self.layout
        if layout is None or not self.replica:
            return None
        host_copy = context.get().settings.host_copy
        return plan(layout, self.model, self.replica, ranks_per_node, racks, host_copy)

    def cost(self) -> float | None:
        """Return the bytes of replicas on each rank for each parameter of the model, None if unknown.

        Tensor, pipeline and data parallel ranks share these bytes alike.
        """
        if self.layout is None:
            return None
        return COPY.get(self.replica, 0) / self.layout.world_size

    def words(self) -> str:
        """Return the protection of the job, in one line."""
        if self.unprotected:
            return f"this script is not protected: {self.unprotected}"
        if self.layout is None:
            return (
                "not known: a training loop of its own is checked when it calls adaptor.protect; the job then"
                " prints how many ranks may be lost, or NOT PROTECTED (TTP_REQUIRE_PROTECTION=True ends it)"
            )
        size, ranks = self.layout.data_parallel, f"with {self.layout.world_size} ranks"
        if self.replica == "none":
            lone = LONE_EXPERTS if self.layout.experts == 1 else "TTP_REPLICA is none"
            lone = self.layout.lone or lone
            reason = "the data-parallel size is 1" if size == 1 else lone
            host_copy = context.get().settings.host_copy if self.layout.may_copy else 0
            copied = tolerance.steps_between_copies(host_copy)
            return f"{ranks} {tolerance.alone(copied)}: {reason}"
        alone = ", but none of experts, which no two ranks share" if self.layout.experts == 1 else ""
        if self.replica == "whole":
            return (
                f"protected {ranks}: each of {size} data-parallel ranks has the whole optimizer state{alone}"
            )
        further_gib = (self.cost() or 0) * 1e9 / 2**30
        return (
            f"protected {ranks}: second copies of optimizer shards by {self.replica}, data-parallel size"
            f" {size}{alone}; {further_gib:.3g} GiB more on each rank for each billion parameters of the "
            "model"
        )


class Preflight:
    """The report of this process, a part of its context; absent in training.

    Attributes:
        findings: the findings about the running script
        knows_ranks: whether the user has given the number of ranks
    """

    def __init__(self, context: Context) -> None:
        self.findings: Findings | None = None
        self.knows_ranks = False


def examine(
    checks: Iterable[Callable[[], None]],
    layout: Callable[[], ParallelLayout],
    model: Callable[[], ModelSize | None],
    not_online: Callable[[], Iterable[str]],
) -> None:
    """Take down every refusal in place of the first, and the layout. Never called in training.

    Args:
        checks: each raises an AdaptorError for one reason to refuse the job.
        model: returns the sizes of the model, None if unknown.
        not_online: returns the reasons why a fault would restart all ranks.
    """
    findings = context.part(Preflight).findings
    assert findings is not None
    problems: list[str] = []
    for check in checks:
        try:
            check()
        except AdaptorError as error:
            problems.append(str(error))
    findings.refusals += [line for line in problems if line not in findings.refusals]
    findings.layout = layout()
    findings.model = model()
    off = [] if context.get().settings.online_s else ["TTP_ONLINE is 0"]
    findings.not_online = [*off, *not_online()]


def run(script: list[str], ranks: int | None) -> Findings:
    """Run `script` (its path and arguments) until its arguments are known; the script's output is dropped.

    Args:
        ranks: of the job; None: twice the fewest that the arguments allow.
    """
    context.part(Preflight).knows_ranks = ranks is not None
    world_size = ranks or 2 * least_world_size(script[1:])
    os.environ.update(
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",  # nothing listens there: no process group is made
    )
    return findings_of(lambda: _script.run(script))


def findings_of(begin: Callable[[], object]) -> Findings:
    """Return the findings about a job.

    Args:
        begin: called here with training prevented; its framework's patches call `examine`.
    """
    report = context.part(Preflight)
    report.findings = result = Findings()
    try:
        with (
            _no_training(),
            Path(os.devnull).open("w") as nothing,
            contextlib.redirect_stdout(nothing),
            contextlib.redirect_stderr(nothing),
        ):
            begin()
        result.error = "the script ended without training"
    except BadArguments as error:
        result.error = f"the parser of the script's arguments: {error}"
    except Stop:
        # Where the layout is not known now, the training loop is the script's own.
        if not patching.is_claimed("ttp"):
            result.unprotected = context.part(UnprotectedTraining).why_unclaimed()
    except AdaptorError as error:
        result.refusals.append(str(error))
    except SystemExit as end:
        code = end.code or 0
        end_text = f"exit code {code}" if isinstance(code, int) else _in_one_line(end)
        result.error = f"the script ended with {end_text}"
    except KeyboardInterrupt:  # of whoever waits for the report
        raise
    except BaseException as error:
        result.error = f"the script ended with {_in_one_line(error)}"
    finally:
        report.findings = None
    if result.layout is not None:
        _choose(result, result.layout)
    return result


def _choose(result: Findings, layout: ParallelLayout) -> None:
    if not layout.sharded:
        result.replica = "whole" if layout.data_parallel > 1 else "none"
        return
    if layout.instances > 1:
        result.replica = "split"
        return
    try:
        result.replica = context.part(ReplicaChoice).replica(layout.data_parallel, layout.experts)
    except AdaptorError as error:
        if str(error) not in result.refusals:
            result.refusals.append(str(error))


def _in_one_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    frame_place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    error_text = " ".join(str(error).split())
    if not error_text and isinstance(error, AssertionError) and frames:
        error_text = frames[-1].line or ""  # the statement; most of Megatron-LM's assertions say nothing
        error_text += _flags_in(error_text)
    return (
        f"{type(error).__name__}: {error_text}{frame_place}"
        if error_text
        else f"{type(error).__name__}{frame_place}"
    )


def _flags_in(assertion: str) -> str:
    """Return the flags of the script named by an assertion about its arguments, in words; '' for others."""
    flags = [f"--{name.replace('_', '-')}" for name in dict.fromkeys(re.findall(r"\bargs\.(\w+)", assertion))]
    if not flags:
        return ""
    is_missing = len(flags) == 1 and assertion.split(",")[0].rstrip().endswith("is not None")
    return f": {flags[0]} is missing" if is_missing else f": correct {' or '.join(flags)}"


@contextlib.contextmanager
def _no_training() -> Iterator[None]:
    """Let a parser print its error, and stop any begin of training."""
    import torch

    def refuse(self: argparse.ArgumentParser, message: str) -> NoReturn:
        raise BadArguments(message)

    def stop(*args: Any, **kwargs: Any) -> NoReturn:
        raise Stop

    places: list[tuple[Any, str, Any]] = [
        (argparse.ArgumentParser, "error", refuse),
        (torch.distributed, "init_process_group", stop),
        (torch.distributed.distributed_c10d, "init_process_group", stop),
        (torch.optim.Optimizer, "__init__", stop),
    ]
    originals = [getattr(owner, name) for owner, name, _ in places]
    try:
        for owner, name, stand_in in places:
            setattr(owner, name, stand_in)
        yield
    finally:
        for (owner, name, _), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


def least_world_size(arguments: list[str]) -> int:
    """Return the least number of ranks that the arguments allow; 1 if the arguments make no sense."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in {*_MODEL, *_EXPERTS}:
        parser.add_argument(f"--{name}", type=int)
    try:
        sizes_given = vars(parser.parse_known_args(arguments)[0])
    except (argparse.ArgumentError, SystemExit):
        return 1

    def product(names: tuple[str, ...], sizes_given: Mapping[str, int | None]) -> int:
        sizes = [sizes_given[name.replace("-", "_")] or 1 for name in names]
        return max(1, math.prod(sizes))

    if sizes_given["expert_tensor_parallel_size"] is None:
        sizes_given["expert_tensor_parallel_size"] = sizes_given["tensor_model_parallel_size"]
    return math.lcm(product(_MODEL, sizes_given), product(_EXPERTS, sizes_given))
