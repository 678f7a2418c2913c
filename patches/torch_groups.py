"""torch's process groups: how each was made is remembered, so that its backend can be made anew.

Armed only where TTP_ONLINE is not 0.
"""

from __future__ import annotations

from typing import Any

from adaptor import patching
from adaptor.online import groups

process_groups = patching.Unit("process-groups", framework="torch", tested=">=2.13,<2.14", group="online")


@process_groups.patch(
    "torch.distributed.distributed_c10d:_new_process_group_helper",
    why="after a fault each process group gets a fresh backend, made with the same arguments",
    accepts="(...)",  # by their names: `global_ranks_in_group`, `store`, `group_name`
    optional=True,
)
def groups_are_remembered(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    made = groups.of_this_process()
    return wrapped(*args, **kwargs) if made is None else made.make(wrapped, args, kwargs)
