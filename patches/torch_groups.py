"""torch's process groups: how each was made is remembered, so that its backend can be made anew, and a wait
for work that gloo has forgotten can be ended.

Armed only where TTP_ONLINE is not 0.
"""

from __future__ import annotations

from typing import Any

from adaptor import context, patching
from adaptor.online.groups import Groups
from adaptor.waits import Waits

# torch's numbers of SEND, RECV and RECVANYSOURCE (`OpType`).
_MESSAGES = (12, 13, 14)

process_groups = patching.Unit("process-groups", framework="torch", tested=">=2.13,<2.14", group="online")


@process_groups.patch(
    "torch.distributed.distributed_c10d:_new_process_group_helper",
    why="after a fault each process group gets a fresh backend, made with the same arguments",
    accepts="(...)",  # by their names: `global_ranks_in_group`, `store`, `group_name`
    optional=True,
)
def groups_are_remembered(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return context.part(Groups).make(wrapped, args, kwargs)


waits = patching.Unit("waits", framework="torch", tested=">=2.13,<2.14", group="online")


@waits.patch(
    "torch.distributed.distributed_c10d:Work.wait",
    why="a survivor leaves a collective that gloo has forgotten",
    accepts="(...)",  # a method of C++, which has no signature
    optional=True,
    plain=True,
)
def waits_can_be_ended(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    of_this_process = context.part(Waits)
    # A wait with a time of its own ends by itself; one for what has ended is over at once, which is the most
    # frequent one.
    if args or kwargs or not of_this_process.acts or instance.is_completed():
        return wrapped(*args, **kwargs)
    return of_this_process.wait(instance, wrapped, message=instance._get_op_type() in _MESSAGES)
