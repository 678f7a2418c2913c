"""Transformer Engine's user buffers between tensor-parallel ranks. Armed only where TTP_ONLINE is not 0."""

from __future__ import annotations

from typing import Any

from adaptor import context, patching

user_buffers = patching.Unit("user-buffers", framework="transformer_engine", tested=">=1.9", group="online")


@user_buffers.patch(
    "transformer_engine.pytorch.module.base:initialize_ub",
    why="after a fault all ranks make these buffers again, as the framework has asked for them",
    accepts="(...)",
    optional=True,
)
def user_buffers_are_remembered(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.online.rank_buffers import RankBuffers

    return context.part(RankBuffers).initialize(wrapped, args, kwargs)
