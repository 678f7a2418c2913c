"""Detects jobs in which Megatron-core's optimizer instances (`split`) do not train as a single instance does.

The check tests the functions of the framework, not its version: forks differ.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from adaptor import context
from adaptor.errors import UnsupportedError

# The argument of `initialize_model_parallel`, and of the framework's options.
INSTANCES = "num_distributed_optimizer_instances"


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
