"""The local copy of a rank's optimizer state before an update (TTP_LOCAL_COPY).

With a copy of the tensors that an update changes no barrier is needed: a rank ahead of the others goes back.
The copy is made in the update window, right before the update, into memory that is allocated once. So until
the next window opens the copy holds the state before the last update. A dump of an earlier step reads the
copy through stand-ins for the framework's optimizers, which equal the optimizers in all but the tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from adaptor import context, output
from adaptor.checkpoint import step_record
from adaptor.replica import twin
from adaptor.replica.mirror import Mirror


def local_copy_of(
    optimizer: Any, mirrors: Sequence[Mirror | None], is_repeated: bool = False
) -> LocalCopy | None:
    """Make the local copy, of `mirrors` too, if the user asked for one (TTP_LOCAL_COPY)."""
    if not context.get().settings.local_copy:
        return None
    local_copy = LocalCopy(optimizer, mirrors)
    if dist.get_rank() == 0 and not is_repeated:
        output.tell(
            "[ttp] a local copy of the optimizer state is made before each update, in place of the barrier"
            f" (TTP_LOCAL_COPY): {local_copy.nbytes / 2**20:.1f} MiB more on rank 0",
            to="stdout",
        )
    return local_copy


class _Kept:
    """The params, state and update counts of a torch optimizer before its last update."""

    def __init__(self, owner: torch.optim.Optimizer) -> None:
        self._owner = owner
        param_copies = [[_like(param) for param in group["params"]] for group in owner.param_groups]
        self.optimizer = twin.make(owner, param_copies, twin.scalars(owner))
        self._copies = dict(zip(twin.params(owner), twin.params(self.optimizer), strict=True))

    @property
    def nbytes(self) -> int:
        """Return the size in bytes, once the owner has all of Adam's state: two moments for each param."""
        return sum((param.element_size() + 8) * param.numel() for param in self._copies)

    def of(self, param: torch.Tensor) -> torch.Tensor:
        return self._copies[param]

    @torch.no_grad()
    def take(self) -> None:
        into, source_tensors = list(self._copies.values()), list(self._copies)
        for group, scalars in zip(self.optimizer.param_groups, twin.scalars(self._owner), strict=True):
            group.update({key: _frozen(value) for key, value in scalars.items()})
        for param, entries in self._owner.state.items():
            state = self.optimizer.state[self._copies[param]]
            for key, value in entries.items():
                if not isinstance(value, torch.Tensor):
                    state[key] = value
                    continue
                if key not in state:
                    state[key] = torch.empty_like(value)
                into.append(state[key])
                source_tensors.append(value)
        if source_tensors:  # a shard of padding alone has no params, which torch reports as an error
            torch._foreach_copy_(into, source_tensors)

    @torch.no_grad()
    def put_back(self) -> None:
        for group, scalars in zip(self._owner.param_groups, twin.scalars(self.optimizer), strict=True):
            group.update({key: _frozen(value) for key, value in scalars.items()})
        for param, copied in self._copies.items():
            param.copy_(copied)
            entries = self.optimizer.state.get(copied, {})
            if not entries:  # the first update
                self._owner.state.pop(param, None)
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    self._owner.state[param][key].copy_(value)
                else:
                    self._owner.state[param][key] = value


class LocalCopy:
    """The local copy of one rank: stand-ins for its optimizer and mirrors as before the last update."""

    def __init__(self, optimizer: Any, mirrors: Sequence[Mirror | None]) -> None:
        inner = [
            getattr(inner_optimizer, "optimizer", None) for inner_optimizer in step_record.chain(optimizer)
        ]
        own_copies = [
            None if inner_optimizer is None else _Kept(inner_optimizer) for inner_optimizer in inner
        ]
        copies = [None if mirror is None else _Kept(mirror.optimizer) for mirror in mirrors]
        self._kept = [kept for kept in (*own_copies, *copies) if kept is not None]
        stand_ins = [
            _stand_in(inner_optimizer, kept)
            for inner_optimizer, kept in zip(step_record.chain(optimizer), own_copies, strict=True)
        ]
        self.optimizer: Any = step_record.with_chain(optimizer, iter(stand_ins))
        self.mirrors = tuple(
            None if mirror is None or kept is None else mirror.on(kept.optimizer)
            for mirror, kept in zip(mirrors, copies, strict=True)
        )

    @property
    def nbytes(self) -> int:
        """Return the size in bytes, once all of Adam's state exists."""
        return sum(kept.nbytes for kept in self._kept)

    def take(self) -> None:
        """Copy the state on the main thread, in the update window, before the update; needs no other rank."""
        for kept in self._kept:
            kept.take()

    def put_back(self) -> None:
        """Restore the state before the last update in the live optimizers, mirrors included."""
        for kept in self._kept:
            kept.put_back()


def _stand_in(optimizer: Any, kept: _Kept | None) -> Any:
    """Return a copy of the framework's optimizer on the kept tensors."""
    stand_in = copy.copy(optimizer)
    if kept is None:  # no params on this rank
        return stand_in
    stand_in.optimizer = kept.optimizer
    mains = getattr(optimizer, "fp32_from_float16_groups", None)
    if mains is not None:
        stand_in.fp32_from_float16_groups = [[kept.of(main) for main in group] for group in mains]
    return stand_in


def _like(param: torch.Tensor) -> torch.Tensor:
    """Return a copy of `param` with the attributes that the framework has set, and saves."""
    param_copy = param.detach().clone()
    param_copy.__dict__.update(vars(param))
    return param_copy.requires_grad_(param.requires_grad)


def _frozen(value: Any) -> Any:
    """Return a copy of a count, which may be a tensor that is counted up in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value
