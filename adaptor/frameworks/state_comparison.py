"""Compares the state of a job of Megatron-LM (`adaptor.verification`): saves with the state in memory, the
holders of a shard, repeated micro-batches, drills, and the load of a custom loop. The load of a save of
Megatron-LM: `checkpoint_load`.

The patches of every worker import this module. Modules with torch are imported at a save: the script imports
torch first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptor import context, output
from adaptor.frameworks.regular_save import RegularSaves
from adaptor.protocol import naming
from adaptor.worker import runtime

if TYPE_CHECKING:
    from adaptor.checkpoint.trainee import MegatronTrainee
    from adaptor.verification.save_check import LoadResult, SaveCheck


def agree(step: int) -> SaveCheck | None:
    """Agree with all ranks on the state to save; None without TTP_VERIFY_SAVES, or without a protected state.
    Collective.

    Raises:
        CheckpointError: the holders of a shard differ; on all ranks.
    """
    if not context.get().settings.verify_saves:
        return None
    from adaptor.checkpoint.trainee import MegatronTrainee
    from adaptor.replica import group
    from adaptor.verification import save_check

    session, everyone = runtime.get().session, group.of_this_job()
    trainee = session.trainee
    if everyone is None or not isinstance(trainee, MegatronTrainee) or not session.is_on_this_thread:
        return None
    has_random = not getattr(trainee.state.args, "no_save_rng", None)
    return save_check.begin(step, trainee, everyone, has_random=has_random)


def compare(content: Any) -> None:
    """Compare an archive before its write in the current thread's save. Raises CheckpointError."""
    check = context.part(RegularSaves).check_in()
    if check is not None:
        check.require_archive(content)


def plan(writer: Any, planner: Any) -> None:
    """Note the plan of a writer of `torch_dist` in the current thread's save. Raises CheckpointError."""
    check = context.part(RegularSaves).check_in()
    if check is not None:
        from adaptor.verification.save_check import PlannedWrites

        context.part(PlannedWrites).plan(check, writer.write_buckets, planner)


def sums_of(path: str | os.PathLike[str], tensors: Iterable[Any]) -> dict[str, str]:
    """Return the sums of the tensors of a writer of `torch_dist`; empty without a plan for the file."""
    if not context.get().settings.verify_saves:
        return {}
    from adaptor.verification.save_check import PlannedWrites

    return context.part(PlannedWrites).handed_over(path, tensors)


def require_written(folder: str | os.PathLike[str]) -> None:
    """Compare the tensors that this rank's writers have written below `folder` with the plan.

    Raises:
        CheckpointError: the tensors differ.
    """
    check = context.part(RegularSaves).check_in(Path(folder))
    if check is not None:
        check.require_written(Path(folder))


def compare_own_load(save: Path, step: int, trainee: MegatronTrainee) -> None:
    """Compare the state that a custom loop has loaded with the last words of `step`, if their manifest has an
    agreed state; print a line if the states differ. Collective.

    Args:
        save: the folder of last words.
        step: the last finished step, as the loop says.
        trainee: of the rank.
    """
    from adaptor.verification import save_check

    _, agreed = save_check.chosen_checkpoint(save, step, step)
    if agreed is not None:
        folder = save / naming.final_name(step)
        result = save_check.compare(folder, agreed, trainee.state, trainee.shares, has_optimizer=True)
        tell_not_compared(folder, result)
        if result.problem and _is_first_rank():
            output.tell(f"[ttp] {result.problem}: training goes on with what the script has loaded")


def tell_not_compared(folder: Path, result: LoadResult) -> None:
    """Print on rank 0 why the loaded state of a checkpoint is not compared with its agreed state."""
    if result.not_compared and _is_first_rank():
        output.tell(
            f"[ttp] {folder}: the loaded state is not compared with the agreed state:"
            f" {'; '.join(result.not_compared[:3])}",
            to="stdout",
        )


def _is_first_rank() -> bool:
    import torch.distributed as dist

    return dist.get_rank() == 0


def attach(worker: runtime.Runtime) -> None:
    """Let the loop of `worker` compare its state with the other holders (TTP_VERIFY_EVERY), and hold drills
    (TTP_DRILL_EVERY); before training begins.
    """
    settings = context.get().settings
    if settings.verify_every != 0:
        from adaptor.verification import twin_check

        worker.session.window.verifier = twin_check.of_this_process(worker.rank, worker.processor.say)
    if settings.drill_every:
        worker.session.drill = drill


def tell_of_intervals(last_step: int | None) -> None:
    """Print a line about each comparison or drill that the job ends before.

    Args:
        last_step: of the job; None: unknown.
    """
    settings = context.get().settings
    every_by_name = {
        "VERIFY": settings.verify_every,
        "DRILL": settings.drill_every,
        "REPLAY": settings.replay_every,
    }
    for name, every in every_by_name.items():
        if last_step and every and every > last_step and _is_first_rank():
            output.tell(
                f"[ttp] TTP_{name}_EVERY is {every}, and the job ends with step {last_step}: no step is due"
            )


def require_replays(model: Sequence[Any]) -> None:
    """Refuse a job of Megatron-LM whose micro-batches cannot be repeated (TTP_REPLAY_EVERY).

    Raises:
        UnsupportedError: names the option.
    """
    if context.get().settings.replay_every:
        from adaptor.frameworks import megatron_replay

        megatron_replay.require_possible(model)


def with_replays(forward_backward: Any) -> Any:
    """Return a schedule of Megatron-core that also repeats micro-batches (TTP_REPLAY_EVERY)."""
    worker = runtime.of_this_process()
    if not context.get().settings.replay_every or not isinstance(worker, runtime.Runtime):
        return forward_backward
    from adaptor.frameworks import megatron_replay

    check = getattr(worker.session.window.verifier, "replay", None)
    return forward_backward if check is None else partial(megatron_replay.step, check, forward_backward)


def drill(step: int) -> None:
    """Hold a drill after `step` if one is due (TTP_DRILL_EVERY); rank 0 tells its agent. Collective.

    Raises:
        RuntimeError: a rank is gone.
    """
    if step % context.get().settings.drill_every:
        return
    from adaptor.replica import group
    from adaptor.verification import given_sums

    worker, everyone = runtime.get(), group.of_this_job()
    if everyone is None or not isinstance(worker, runtime.Runtime) or worker.session.trainee is None:
        return
    drilled = given_sums.hold(step, worker.session.trainee, worker.session.board.record(), everyone)
    if drilled is None:
        return
    worker.processor.say(drilled)
    # Later failed drills are in the status alone.
    if drilled.problem and context.get().is_first("failed drill"):
        output.tell(
            f"[ttp] drill: step {step} could not be saved bit for bit without rank {drilled.lost}:"
            f" {drilled.problem}",
            to="stdout",
        )
