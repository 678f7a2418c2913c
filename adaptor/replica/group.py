"""The adaptor's own process group of all ranks: gloo, whatever backend the framework uses."""

from __future__ import annotations

import torch.distributed as dist

from adaptor import context
from adaptor.waits import Waits

_everyone: dist.ProcessGroup | None = None


def of_everyone() -> dist.ProcessGroup:
    """Make the group. Collective: every rank calls it."""
    global _everyone
    # By its place, not by its name: with MindSpeed's --disable-gloo-group, with which the framework is to
    # have no gloo groups of its own, nothing is made for `backend="gloo"`.
    made: dist.ProcessGroup = dist.new_group(None, None, "gloo")
    _everyone = made
    return made


def of_this_job() -> dist.ProcessGroup | None:
    """Return the group that was made last."""
    return _everyone


def barrier(everyone: dist.ProcessGroup) -> None:
    """Wait at a barrier of the group of all ranks; another thread can end the wait.

    A rank may die between its barrier and that of the others, and gloo forgets what it was just sending to
    it. Without an end the others would wait until the save has no time left.

    Raises:
        RuntimeError: the barrier is broken.
    """
    work = dist.barrier(group=everyone, async_op=True)
    context.part(Waits).wait(work, work.wait)
