"""Megatron-core's optimizers: which options rule out optimizer instances (`split`), and the hooks of updates.

Jobs are detected in which several instances do not train as a single instance does. The check tests the
functions of the framework, not its version: forks differ.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from adaptor import context, hooks
from adaptor.context import Context
from adaptor.errors import UnsupportedError
from adaptor.frameworks import supported_options
from adaptor.worker import runtime

# The argument of `initialize_model_parallel`, and of the framework's options.
INSTANCES = "num_distributed_optimizer_instances"
# In `parallel_state`: the half of a group that was cut in two, and the whole of it.
_HALVES = {
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "_DATA_PARALLEL_GROUP_WITH_CP",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "_EXPERT_DATA_PARALLEL_GROUP",
}
# The attribute of an inner optimizer whose hooks are registered.
_PASSES_THE_DOOR = "_ttp_passes_the_door"


class PutOff:
    """The postponed calls that need other ranks and would have run between two updates of a chain.

    A part of the context of a process.

    Attributes:
        calls: postponed gathers of parameters, by part of the model
        further: postponed quantizations of parameters, in which ranks compare their largest elements, and
            gathers of the parameters of a single optimizer
    """

    def __init__(self, context: Context) -> None:
        self.calls: WeakKeyDictionary[Any, list[tuple[Any, Any]]] = WeakKeyDictionary()
        self.further: list[Callable[[], Any]] = []

    def catch_up(self) -> None:
        """Make the further calls, in the order of the chain."""
        further, self.further = self.further, []
        for call in further:
            call()

    def forget(self) -> None:
        """Forget the calls of an abandoned step: other ranks may have made them, or are new."""
        self.calls.clear()
        self.further.clear()


def require_groups() -> None:
    """Refuse a job whose process groups are not those of `parallel_state`.

    Raises:
        UnsupportedError: nobody has called `initialize_model_parallel`.
    """
    from megatron.core import parallel_state

    if not parallel_state.is_initialized():
        raise UnsupportedError(
            "the process groups of Megatron-core's parallel_state are not made, as with"
            " use_decentralized_pg=True or a ProcessGroupCollection of the script: call"
            " parallel_state.initialize_model_parallel, or set ENABLE_TTP=False"
        )


def wrong_in_framework() -> str:
    """Return why no job of this framework can have two optimizer instances; empty: jobs can."""
    from megatron.core import parallel_state
    from megatron.core.package_info import __version__

    if INSTANCES not in inspect.signature(parallel_state.initialize_model_parallel).parameters:
        return f"Megatron-core {__version__} has no optimizer instances (since 0.10)"
    if not hasattr(parallel_state, "get_intra_distributed_optimizer_instance_group"):
        # From 0.10 to 0.12 the norm is summed over all instances, and too large by the root of their number.
        return (
            f"Megatron-core {__version__} clips gradients wrongly with optimizer instances (right since 0.13)"
        )
    return ""


def wrong_with_options(ddp_options: Any, stages: int, *, aligned: bool) -> str:
    """Return why two optimizer instances would train differently from a single instance with these options;
    empty: no difference.

    Args:
        ddp_options: the options of DDP, under the framework's own names.
        stages: the pipeline size.
        aligned: whether pipeline stages after the first start their reductions together, once all of their
            micro-batches are done (`--align-grad-reduce`, the default).
    """
    if getattr(ddp_options, "reduce_scatter_with_fp32_accumulation", False):
        return "--reduce-scatter-with-fp32-accumulation allows a single optimizer instance"
    if not ddp_options.overlap_grad_reduce:
        return ""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as BucketGroup

    # Since 0.16. A stage that starts its reductions together never counts its first batch as over, and with
    # several instances there is no handle that tells that it has reduced: it does so once more at the end.
    if stages > 1 and aligned and "is_first_batch" in _names_in(BucketGroup.finish_grad_sync):
        return (
            "with --overlap-grad-reduce and pipeline stages this Megatron-core reduces gradients twice where"
            " there are several optimizer instances (--no-align-grad-reduce avoids it)"
        )
    # From 0.14 to 0.16 (NVIDIA/Megatron-LM issue 3670): gradients become ready on the stream on which DDP was
    # built, but the reduction waits for the default stream. On a CPU there are no streams.
    if context.get().settings.device != "cpu" and "default_stream" in _names_in(BucketGroup.start_grad_sync):
        return (
            "with --overlap-grad-reduce this Megatron-core may reduce gradients before they are ready where"
            " there are several optimizer instances (right since 0.17)"
        )
    return ""


def _names_in(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of attributes and globals that a function uses."""
    names: tuple[str, ...] = inspect.unwrap(function).__code__.co_names
    return names


@contextlib.contextmanager
def whole_groups() -> Iterator[None]:
    """Give the framework the whole group where the framework asks for the half of an optimizer instance."""
    from megatron.core import parallel_state

    halves = {name: getattr(parallel_state, name) for name in _HALVES if hasattr(parallel_state, name)}
    for name in halves:
        setattr(parallel_state, name, getattr(parallel_state, _HALVES[name]))
    try:
        yield
    finally:
        for name, half in halves.items():
            setattr(parallel_state, name, half)


def _require_one_gathering() -> None:
    """Refuse a chain of optimizers that cannot update without other ranks. Raises UnsupportedError."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.package_info import __version__

    if not hasattr(DistributedDataParallel, "start_param_sync"):
        raise UnsupportedError(
            f"--num-experts: Megatron-core {__version__} gathers parameters after each of several "
            "optimizers, which cannot be protected; use 0.9 or later, or set ENABLE_TTP=False"
        )


def let_pass_the_door(megatron_optimizer: Any) -> None:
    """Register the hooks that take each update of a Megatron optimizer through the door, once.

    Raises:
        UnsupportedError: the update needs other ranks, or the optimizer has state that no other rank has.
    """
    from adaptor.checkpoint import layer_wise, step_record  # torch, which is for the script to import
    from adaptor.frameworks import master_params, offloaded_memory

    chain = step_record.chain(megatron_optimizer)
    # Commits of 0.20 with #6666 and without #6920: after a load a rank has only its own weights from the main
    # params, because this method looks for the model in the parts of the chain.
    if any(hasattr(part, "_unique_model_chunks") for part in layer_wise.parts_of(megatron_optimizer)):
        raise UnsupportedError(
            "this commit of Megatron-core does not go on from what it saves with a layer-wise optimizer"
            " (NVIDIA/Megatron-LM#6920); use an earlier or a later one, or set ENABLE_TTP=False"
        )
    if len(chain) > 1:
        _require_one_gathering()
    for part in chain if len(chain) > 1 else ():
        # Only for timing, it would be a barrier of all ranks inside the update window.
        part.config.barrier_with_L1_time = False
    for part in chain:
        master_params.attach(part)
        places = [offloaded_memory.attach(part), *(hook.memory_of(part) for hook in hooks.of_worker())]
        memories = [memory for memory in places if memory is not None]
        for inner in step_record.inner(part):
            _require_own_update(inner)
            if not hasattr(inner, _PASSES_THE_DOOR):  # Muon's chain has optimizers of another chain
                setattr(inner, _PASSES_THE_DOOR, True)
                inner.register_step_pre_hook(partial(_before_update, memories))
                inner.register_step_post_hook(partial(_after_update, memories))


def _require_own_update(inner: Any) -> None:
    """Refuse Muon with an update that needs other ranks: up to 0.16 its config has the name of Adam.

    Raises:
        UnsupportedError: names the mode of Muon.
    """
    groups = getattr(inner, "pg_collection", None)
    mode = getattr(inner, "tp_mode", getattr(inner, "mode", None))  # `mode` up to 0.16
    if groups is not None and mode is not None:
        supported_options.require_blockwise(mode, groups.tp.size())


def _before_update(memories: Sequence[Any], inner: Any, *_: Any) -> None:
    runtime.get().session.before_update(inner)
    for memory in memories:
        memory.before_update()


def _after_update(memories: Sequence[Any], inner: Any, *_: Any) -> None:
    for memory in memories:
        memory.after_update()
    runtime.get().session.after_update(inner)
