"""A custom training loop on Megatron-core: its state, its checkpoint from host copies, and online recovery.

The script loads checkpoints by itself, and announces the load by `adaptor.write_host_copies`, right before it
looks for a checkpoint. A copy has the entries of `extra` as they were after its step.

The loop is called once more after the last finished step. All other needs of a loop were created before: a
new process runs the script up to the loop, and gets the state from a survivor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megatron.core import parallel_state, tensor_parallel

from adaptor import context
from adaptor.checkpoint.step_record import RandomStates, StepRecord
from adaptor.checkpoint.trainee import MegatronTrainee, ProtectedState
from adaptor.checkpoint.training_state import CheckpointContents, format_named
from adaptor.context import Context
from adaptor.errors import StartError, UnsupportedError
from adaptor.frameworks.megatron_online_support import why_not_on_core
from adaptor.frameworks.training_loop import ProtectedLoop
from adaptor.host_copy import content, copier, rebuild
from adaptor.online.rejoin import Rejoin
from adaptor.protocol.environment import Generation
from adaptor.protocol.naming import model_parallel_folder
from adaptor.worker import runtime
from adaptor.worker.runtime import UNDECIDED


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
        group=folder_of_rank(),
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


def write_host_copies(protected: ProtectedState) -> int | None:
    """Implement `adaptor.write_host_copies` in a process that trains with others."""
    context.part(CopiesAsked).asked = True
    if context.get().settings.host_copy == 0 or not context.part(Generation).is_restart:
        return None
    written = rebuild.write_newest(protected)
    copier.require_training()
    return written


# Is given the last finished step, and the counters after it.
GoBack = Callable[[int, Mapping[str, int | float]], Any]
T = TypeVar("T")


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
        with self._session.phase("go_back"):  # to come to the place in its data may take longer than a step
            self._go_back(record.step, record.counters)
        trainee = self._session.trainee
        assert isinstance(trainee, MegatronTrainee)
        # A data loader of torch draws a seed when it is made, and a sampler may shuffle.
        trainee.random.put_back(record.rng)

    def copied_steps(self) -> tuple[int, ...]:
        made = self._session.copier if self._last is None else None
        return () if made is None else made.steps


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
