"""torch's process groups: the arguments of each group are kept, so that its backend can be made anew, and a
wait for work forgotten by gloo can be ended. And Transformer Engine's buffers between tensor-parallel ranks.

Armed only where TTP_ONLINE is not 0; waits (group `waits`) only where the job is recovered online, with gloo
in all groups.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from adaptor import context, patching
from adaptor.online.groups import Groups
from adaptor.waits import Waits

# The versions of torch with which the online recovery was tested.
_TESTED = ">=2.7,!=2.8.*,!=2.10.*,!=2.11.*,!=2.12.*,!=2.14.*,<2.16"
# torch's numbers of SEND, RECV and RECVANYSOURCE (`OpType`).
_MESSAGES = (12, 13, 14)

process_groups = patching.Unit("process-groups", framework="torch", tested=_TESTED, group="online")


@process_groups.patch(
    "torch.distributed.distributed_c10d:_new_process_group_helper",
    why="after a fault each process group gets a fresh backend, made with the same arguments",
    optional=True,
    replaced_by="torch_npu.distributed.distributed_c10d",  # which has a copy of it for HCCL
)
def groups_are_remembered(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return context.part(Groups).make(wrapped, args, kwargs)


waits = patching.Unit("waits", framework="torch", tested=_TESTED, group="waits")


@waits.patch_plainly(
    "torch.distributed.distributed_c10d:Work.wait",
    why="a survivor leaves a collective that gloo has forgotten",
)
def waits_can_be_ended(native: Callable[..., bool], unit: patching.Unit) -> Callable[..., bool]:
    """Return a function that waits for work as `native` does, with waits that can be ended.

    A wait with a time limit ends by itself; a wait for completed work is over at once. The latter is the most
    frequent wait, eight times in a micro-batch, so the function makes only these two calls.
    """

    def wait(work: Any, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            return native(work, timeout)
        if work.is_completed() or not unit.acts:
            return native(work)
        return context.part(Waits).wait(work, native.__get__(work), message=work._get_op_type() in _MESSAGES)

    return wait


user_buffers = patching.Unit("user-buffers", framework="transformer_engine", tested=">=1.9", group="online")


@user_buffers.patch(
    "transformer_engine.pytorch.module.base:initialize_ub",
    why="after a fault all ranks make these buffers again, as the framework has asked for them",
    optional=True,
)
def user_buffers_are_remembered(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    from adaptor.online.rank_buffers import RankBuffers

    return context.part(RankBuffers).initialize(wrapped, args, kwargs)
