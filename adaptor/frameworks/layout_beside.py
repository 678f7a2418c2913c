"""The layout file in every checkpoint of a job of Megatron-LM: made when training begins, written with each.

A failure of the file stops neither job nor save: a checkpoint then has no layout file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from adaptor import context, output
from adaptor.checkpoint import disk, layout_file, layout_of_job
from adaptor.checkpoint.placement import CheckpointPlacement
from adaptor.checkpoint.training_state import TrainingState
from adaptor.errors import CheckpointError
from adaptor.frameworks.regular_save import RegularSaves
from adaptor.protocol.naming import LAYOUT
from adaptor.replica.group import gather_values


def take(
    state: TrainingState, place: CheckpointPlacement, everyone: dist.ProcessGroup
) -> Mapping[str, bytes]:
    """Describe the layout of the job, for regular saves; return this rank's part for its last words, by name:
    collective.

    Args:
        state: the state of this rank.
        place: the place of this rank in checkpoints.
        everyone: all ranks of the job.
    """
    part, own_problem = b"", ""
    if everyone.rank() == place.first:  # the others of its group have the same
        part, own_problem = _described(state)
    gathered = gather_values((place.group, part, own_problem), everyone)
    problem = next((rank_problem for _, _, rank_problem in gathered if rank_problem), "")
    if problem:
        if everyone.rank() == 0:
            output.tell(
                f"[ttp] checkpoints have no layout file ({problem}): the job trains and resumes all the same;"
                " transform reads only those of the format torch without one, and not all of these"
                " (docs/transform.md)",
                to="stdout",
            )
        return {}
    layout_files = {LAYOUT: layout_file.join(part for _, part, _ in gathered if part)}
    context.part(RegularSaves).on_top = layout_files  # rank 0 completes them
    return layout_files if place.group == gathered[0][0] else {}


def write_alone(path: Path, barrier: Callable[[], None]) -> NoReturn:
    """Write the layout of the job to `path`, and end the script: collective.

    Raises:
        CheckpointError: the layout is missing, or the disk refuses the file; on rank 0.
    """
    if dist.get_rank() == 0:
        content = context.part(RegularSaves).on_top.get(LAYOUT)
        if content is None:
            raise CheckpointError(f"{path}: is not written, because the framework does not say the layout")
        try:
            disk.replace(path.absolute().parent, path.name, content)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error
        output.tell(f"[ttp] {path}: the layout of {dist.get_world_size()} ranks is written", to="stdout")
    barrier()  # no rank ends while another is at work
    sys.exit(0)


def _described(state: TrainingState) -> tuple[bytes, str]:
    """Return the layout of this rank as a part of the file, or the reason for a missing layout; the other
    ranks wait for the result.
    """
    try:
        return layout_file.encode(layout_of_job.describe(state, *_place(state.args))), ""
    except Exception as error:  # of whatever the framework's own functions raise
        return b"", (str(error) or type(error).__name__)[:200]


def _place(args: Any) -> tuple[dict[str, int], dict[str, int], str]:
    """Return the numbers of this rank, the parallel sizes, and the version of Megatron-core."""
    import megatron.core
    from megatron.core import mpu

    ranks = {
        "tp": mpu.get_tensor_model_parallel_rank(),
        "pp": mpu.get_pipeline_model_parallel_rank(),
        "ep": mpu.get_expert_model_parallel_rank(),
    }
    tp = mpu.get_tensor_model_parallel_world_size()
    sizes = {
        "tp": tp,
        "pp": mpu.get_pipeline_model_parallel_world_size(),
        "vpp": getattr(args, "virtual_pipeline_model_parallel_size", None) or 1,
        "ep": mpu.get_expert_model_parallel_world_size(),
        "etp": getattr(args, "expert_tensor_parallel_size", None) or tp,
        "dp": mpu.get_data_parallel_world_size(),
        "cp": mpu.get_context_parallel_world_size(),
    }
    return ranks, sizes, str(getattr(megatron.core, "__version__", ""))
