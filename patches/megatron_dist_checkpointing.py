"""Megatron-core's writers of `torch_dist`: tensors of a regular save are hashed during their write.

A separate unit: a custom training loop on Megatron-core imports these writers, and nothing of Megatron-LM's
`save_checkpoint`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from adaptor import context, patching
from adaptor.frameworks import compared_save
from adaptor.frameworks.regular_save import RegularSaves
from adaptor.patches._versions import MEGATRON

dist_checkpointing = patching.Unit("dist-checkpointing", framework="megatron-core", tested=MEGATRON)


@dist_checkpointing.patch(
    "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync.write_preloaded_data",
    why="the tensors of a regular save get checksums where they are written, before the save goes on",
    accepts="(...)",
    optional=True,  # up to 0.6; without it, tensors of torch_dist have no checksums
)
def tensors_of_a_regular_save_are_hashed(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    # In a process or thread of the framework's own, of several that write at the same time.
    if kwargs.get("write_bucket") is None or kwargs.get("results_queue") is None:
        return wrapped(*args, **kwargs)
    (path, _, (_, tensors)), results = kwargs["write_bucket"], kwargs["results_queue"]
    sums = partial(compared_save.sums_of, path, tensors)
    hashing = context.part(RegularSaves).hashing(path, results, sums)
    return wrapped(*args, **{**kwargs, "results_queue": hashing})


_CORE = "megatron.core.dist_checkpointing"


@dist_checkpointing.patch(
    f"{_CORE}.strategies.filesystem_async:FileSystemWriterAsync.prepare_write_data",
    why="the tensors of a regular save are compared with the state in memory, and with what is written later",
    accepts="(plan, planner)",
    optional=True,
)
def planned_tensors_are_compared(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    planned = wrapped(*args, **kwargs)
    with context.part(RegularSaves).noting():
        compared_save.plan(instance, args[1] if len(args) > 1 else kwargs["planner"])
    return planned


@dist_checkpointing.patch(
    f"{_CORE}.strategies.filesystem_async:FileSystemWriterAsync.retrieve_write_results",
    why="a rank whose writers have failed joins the gather of results, in which all other ranks wait for it",
    accepts="()",
    optional=True,
)
def failed_writers_have_no_results(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    saves = context.part(RegularSaves)
    with saves.noting():
        results = wrapped(*args, **kwargs)  # up to 0.13 and in 0.15.0rc5 it raises; else it returns the error
        if saves.notes_errors and isinstance(results, tuple):
            raise results[0]
        compared_save.require_written(instance.checkpoint_dir)
        return results
    return []


def errors_of_storage_are_noted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    with context.part(RegularSaves).noting():
        return wrapped(*args, **kwargs)


for _target, _what in {
    f"{_CORE}.strategies.filesystem_async:FileSystemWriterAsync.finish": "metadata that cannot be written",
    f"{_CORE}.core:save_config": "a file of the format that cannot be written",
}.items():
    dist_checkpointing.patch(
        _target,
        why=f"{_what} is noted on this rank: all ranks learn it at the next barrier of the save",
        accepts="(...)",
        optional=True,
    )(errors_of_storage_are_noted)
