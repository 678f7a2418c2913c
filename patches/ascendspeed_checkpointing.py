"""ModelLink's checkpoints (`ascendspeed`): the same as Megatron-LM's checkpoints, see
`megatron_checkpointing`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from adaptor import context, patching
from adaptor.checkpoint import resume_check
from adaptor.checkpoint.divided_reading import CheckedFiles
from adaptor.frameworks.regular_save import RegularSaves
from adaptor.patches._versions import MODELLINK
from adaptor.worker import runtime

checkpointing = patching.Unit("ascendspeed-checkpointing", framework="ascendspeed", tested=MODELLINK)


@checkpointing.patch(
    "ascendspeed.checkpointing:save_checkpoint",
    why="a regular save that is cut short must not leave half a checkpoint under a final name",
    accepts="(iteration, model, optimizer, lr_scheduler)",
)
def regular_saves_are_complete(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from ascendspeed import get_args

    with (
        runtime.get().session.phase("save"),
        context.part(RegularSaves).regular(get_args().save, args[0] if args else kwargs["iteration"]),
    ):
        return wrapped(*args, **kwargs)


@checkpointing.patch(
    "ascendspeed.checkpointing:get_checkpoint_name",
    why="a regular save goes to a folder of its own until every rank has written",
    accepts="(checkpoints_path, iteration, release=, ...)",
)
def regular_saves_have_a_name_of_their_own(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return context.part(RegularSaves).renamed(wrapped(*args, **kwargs))


@checkpointing.patch(
    "ascendspeed.checkpointing:get_checkpoint_tracker_filename",
    why="every rank has written: the folder gets its final name before the tracker names it",
    accepts="(checkpoints_path)",
)
def the_tracker_comes_last(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return context.part(RegularSaves).tracker(wrapped(*args, **kwargs))


@checkpointing.patch(
    "ascendspeed.checkpointing:load_checkpoint",
    why="a checkpoint that was damaged after its save is set aside; the newest intact one is loaded",
    accepts="(model, optimizer, lr_scheduler, load_arg=, ...)",
)
def what_is_loaded_is_intact(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from ascendspeed import get_args

    megatron_args = get_args()
    load = getattr(megatron_args, args[3] if len(args) > 3 else kwargs.get("load_arg", "load"))
    with runtime.get().session.pace.loading(), context.part(CheckedFiles).loading():
        resume_check.require_intact(Path(load), Path(megatron_args.save), None)
        return wrapped(*args, **kwargs)
