"""A custom training loop on Megatron-core: its state, its checkpoint from host copies, and online recovery.

The script loads checkpoints by itself, and announces the load by `adaptor.write_host_copies`, right before it
looks for a checkpoint. A copy has the entries of `extra` as they were after its step.

The loop is called once more after the last finished step. All other needs of a loop were created before: a
new process runs the script up to the loop, and gets the state from a survivor.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.package_info import __version__

from adaptor import context, hooks, patching
from adaptor.checkpoint import layer_wise, left_overs, save_folder_claim
from adaptor.checkpoint.step_record import RandomStates, StepRecord
from adaptor.checkpoint.trainee import MegatronTrainee, ProtectedState
from adaptor.checkpoint.training_state import CheckpointContents, format_named
from adaptor.context import Context
from adaptor.errors import StartError, UnsupportedError
from adaptor.frameworks import (
    kernel_timeout,
    optimizer_instances,
    state_comparison,
    supported_options,
    training_loop,
)
from adaptor.frameworks.megatron_online_support import why_not_on_core
from adaptor.frameworks.training_loop import ProtectedLoop
from adaptor.host_copy import content, copier, rebuild
from adaptor.library import GoBack, Protection, whole_number
from adaptor.online import rejoin
from adaptor.online.rejoin import Rejoin
from adaptor.protocol.environment import Generation
from adaptor.protocol.naming import model_parallel_folder
from adaptor.replica.choice import ReplicaChoice
from adaptor.worker import runtime
from adaptor.worker.runtime import UNDECIDED

T = TypeVar("T")

# Any duration that is not 0: a phase has at least five times TTP_HANG.
_GO_BACK_S = 0.001


class CopiesAsked:
    """A mark in the context of a process.

    Attributes:
        asked: its script has asked for a checkpoint from host copies
    """

    def __init__(self, _context: Context) -> None:
        self.asked = False


def require_asked() -> None:
    """Refuse TTP_HOST_COPY in a script that would not go on from the copies. Raises UnsupportedError."""
    if context.get().settings.host_copy and not context.part(CopiesAsked).asked:
        raise UnsupportedError(
            "TTP_HOST_COPY is set: a loop of your own goes on from copies in host memory only where it calls"
            " adaptor.write_host_copies before it loads; do so, or leave it out"
        )


def folder_of_rank() -> str:
    """Return the name of the folder of this rank's files in a checkpoint."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    experts = parallel_state.get_expert_model_parallel_world_size()
    return model_parallel_folder(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank() if stages > 1 else None,
        parallel_state.get_expert_model_parallel_rank() if experts > 1 else None,
    )


def protected_state(
    *,
    model: Sequence[Any],
    optimizer: Any,
    save: str | Path,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    format: str = "torch",
    contents: CheckpointContents | None = None,
    increment: Callable[[], int] = lambda: 0,
    may_copy: bool = True,
) -> ProtectedState:
    """Return the state that `adaptor.protect` is given, with the same arguments."""
    return ProtectedState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        save=save,
        group=layer_wise.group_of(folder_of_rank(), optimizer),
        make_format=format_named(format, "format"),
        contents=contents or CheckpointContents(),
        increment=increment,
        random=lambda: RandomStates(tensor_parallel.get_cuda_rng_tracker()),
        sizes=lambda: (
            parallel_state.get_data_parallel_world_size(with_context_parallel=True),
            parallel_state.get_expert_data_parallel_world_size(),
        ),
        may_copy=may_copy,
        extra=extra or {},
    )


class LibraryLoop(ProtectedLoop):
    """A custom training loop (`online.state.Loop`).

    Args:
        go_back: brings the script back to the end of a step.
        last: the number of the last step; None: the loop of a framework, which knows its last step, and goes
            back to any step.
    """

    def __init__(self, protected: ProtectedState, go_back: GoBack | None, last: int | None) -> None:
        super().__init__(protected)
        self._go_back = go_back
        self._last = last

    def answers(self, step: int) -> Mapping[str, Any]:
        return {"last": self._last}

    def agree(self, step: int) -> None:
        """Nothing comes after a step: it is in the function."""

    def put_back(self, record: StepRecord) -> None:
        for chunk in self._model:  # a loop may do so after its update
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._record = record

    def finish_step(self) -> None:
        record, self._record = self._record, None
        if record is None or self._go_back is None:
            return
        # To come to the place in the data may take longer than a step. All ranks wait for each other, so the
        # first also has a limit: five times TTP_HANG.
        with self._session.phase("go_back", usual_s=_GO_BACK_S):
            self._go_back(record.step, record.counters)
        trainee = self._session.trainee
        assert isinstance(trainee, MegatronTrainee)
        # A data loader of torch draws a seed when it is made, and a sampler may shuffle.
        trainee.random.put_back(record.rng)

    def copied_steps(self) -> tuple[int, ...]:
        copier = self._session.copier if self._last is None else None
        return () if copier is None else copier.steps


class OwnLoopRecovery:
    """Online recovery of a custom loop; the loop's first step decides whether recovery is possible."""

    def __init__(self, worker: Rejoin, protected: ProtectedState) -> None:
        self._worker = worker
        self._protected = protected
        model, config = protected.model, getattr(protected.optimizer, "config", None)
        self._why_not = why_not_on_core(model[0].config, model[0].ddp_config, config)
        worker.set_online_support(self._why_not or UNDECIDED)

    def decline(self) -> None:
        """Decline recovery: the loop makes its steps in another way.

        Raises:
            StartError: in a replacement process whose predecessor's loop used `run_steps`.
        """
        if self._worker.newcomer:
            raise StartError(
                "a step was begun outside of protection.run_steps, by which other ranks make theirs"
            )
        if not self._why_not:
            self._worker.set_online_support(
                "its training loop does not make its steps by protection.run_steps"
            )
            runtime.get().session.tell_again()

    def run(
        self, train: Callable[[int | None], T], go_back: GoBack | None, why_not: str, last: int | None
    ) -> T:
        """Call `train` with `last`, and again after the last finished step after each fault.

        Args:
            go_back: puts the loop's own state to a step; None: the loop has no state of its own.
            why_not: why the framework cannot call its loop again; empty: the framework can.
            last: the number of the last step; None: only the loop of a framework knows it.

        Returns:
            The result of `train`.
        """
        worker, session = self._worker, runtime.get().session
        if worker.newcomer:
            answer = worker.ask_record(lambda step: content.read_record(content.own_copy(step)).record)
            # The script may count it from the step of the checkpoint that it has loaded.
            last = answer.answers["last"]
        elif self._why_not:
            return train(last)
        worker.set_online_support(why_not)
        if not worker.newcomer:
            session.tell_again()
            if why_not:
                return train(last)
        return worker.run(LibraryLoop(self._protected, go_back, last), lambda: train(last))


def _require_megatron(model: Any, optimizer: Any) -> list[Any]:
    """Return the chunks of the model.

    Raises:
        UnsupportedError: Megatron-core has not made the chunks or the optimizer.
    """
    chunks = list(model) if isinstance(model, Sequence) else [model]
    if not chunks or not all(hasattr(chunk, "ddp_config") and hasattr(chunk, "config") for chunk in chunks):
        kinds = ", ".join(type(chunk).__name__ for chunk in chunks) or "empty"
        raise UnsupportedError(
            f"model is {kinds}: adaptor.protect needs a list of Megatron-core's DistributedDataParallel"
        )
    if not hasattr(optimizer, "get_loss_scale"):
        raise UnsupportedError(
            f"optimizer is {type(optimizer).__name__}: adaptor.protect needs what Megatron-core's "
            "get_megatron_optimizer returned"
        )
    return chunks


def _require_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler whose step the adaptor cannot complete. Raises UnsupportedError."""
    if scheduler is not None and not hasattr(scheduler, "num_steps"):
        raise UnsupportedError(
            f"scheduler is {type(scheduler).__name__}: adaptor.protect needs Megatron-core's"
            " OptimizerParamScheduler, or None"
        )


def _require_picklable(extra: Mapping[str, Any]) -> None:
    """Refuse an entry that no checkpoint can have. Raises UnsupportedError."""
    for name, value in extra.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise UnsupportedError(
                f"extra[{name!r}] is {type(value).__name__}, which cannot be saved"
                f" ({type(error).__name__}: {error}); give values that pickle can write"
            ) from None


def _claim(optimizer: Any) -> None:
    """Claim the job, unless claimed before its process groups were made; present groups stay unchanged."""
    if patching.claim("ttp"):
        context.part(ReplicaChoice).cannot_split(
            "the process groups were made before adaptor.enable() was called, or without it"
        )
        optimizer_instances.let_pass_the_door(optimizer)


def protect(
    model: Sequence[Any],
    optimizer: Any,
    save: str | Path,
    step: int,
    samples_per_step: int | Callable[[], int],
    format: str,
    **described: Any,
) -> Protection:
    """Do the work of `adaptor.protect`, if the adaptor is enabled; with the same arguments.

    Raises:
        UnsupportedError: as `adaptor.protect` says.
    """
    patching.check("ttp")
    supported_options.require_no_layout_only()
    step = whole_number(step)
    _require_picklable(described.get("extra") or {})
    _require_scheduler(described.get("scheduler"))
    increment = samples_per_step if callable(samples_per_step) else lambda: samples_per_step
    model = _require_megatron(model, optimizer)
    optimizer_instances.require_groups()
    _claim(optimizer)
    kernel_timeout.note(model[0].config)
    if not hasattr(parallel_state, "get_expert_data_parallel_world_size"):
        raise UnsupportedError(
            f"Megatron-core is {__version__}: adaptor.protect needs 0.10 or later; set ENABLE_TTP=False"
        )
    # A rank that trains nothing has an empty chain of optimizers, which has no config.
    supported_options.require_protected(
        getattr(optimizer, "config", None), model[0].config, model[0].ddp_config, format=format
    )
    if model[0].config.num_moe_experts is not None:
        supported_options.require_folders_for_experts(
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
    supported_options.require_no_replay()
    for hook in hooks.of_worker():
        hook.require_other_loop(dist.get_world_size())
    worker = rejoin.of_this_process()
    comes_new = worker is not None and worker.newcomer  # this job is in the middle of its training
    if not comes_new:
        save_folder_claim.require_writable(save)
        require_asked()
        save_folder_claim.require_no_later_step(save, step)
    if dist.get_rank() == 0 and not comes_new:
        save_folder_claim.claim(save)
        left_overs.clean(Path(save))
    # A new process does not ask: the ranks that train tell it whether they make copies.
    copies = comes_new or context.part(CopiesAsked).asked
    training_loop.attach(copies=copies)
    protected = protected_state(
        model=model,
        optimizer=optimizer,
        save=save,
        format=format,
        increment=increment,
        may_copy=copies,
        **described,
    )
    recovery = None if worker is None else OwnLoopRecovery(worker, protected)
    compare = partial(state_comparison.compare_own_load, Path(save), step) if step else None
    training_loop.begin_training(protected, step, compare)
    return Protection(runtime.get().session, step, recovery)


def write_host_copies(*, model: Sequence[Any], optimizer: Any, **described: Any) -> int | None:
    """Do the work of `adaptor.write_host_copies`, if the adaptor is enabled; with the same arguments."""
    patching.check("ttp")
    chunks = _require_megatron(model, optimizer)
    _claim(optimizer)
    if rejoin.is_newcomer():  # its state comes from others
        return None
    context.part(CopiesAsked).asked = True
    if context.get().settings.host_copy == 0 or not context.part(Generation).is_restart:
        return None
    protected = protected_state(model=chunks, optimizer=optimizer, **described)
    written = rebuild.write_newest(protected)
    copier.require_training()
    return written
