"""torch's data loaders: the time in which a training loop waits for data is counted, for operators."""

from __future__ import annotations

import os
from typing import Any

from adaptor import patching
from adaptor.worker import runtime

data = patching.Unit("data", framework="torch", tested=">=2.4,<3", group="worker")


@data.patch(
    "torch.utils.data.dataloader:_BaseDataLoaderIter.__next__",
    why="what a job spends on waiting for data stands in its goodput",
    accepts="(...)",
    optional=True,  # without it that time counts as that of steps
)
def waiting_for_data_is_counted(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    worker = runtime.of_this_process()
    if worker is None or worker.pid != os.getpid():  # a process that was forked from a worker
        return wrapped()
    return worker.session.wait_for_data(wrapped)
