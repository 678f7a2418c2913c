"""Stands in for DeepEP: its buffer over NVLink, which dispatches tokens to experts, by gloo.

Like the real buffer, the stand-in is made by all members of a group, knows their processes from then on, and
may only be destroyed together: its destructor waits for all members.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deep_ep.utils import EventOverlap

__all__ = ["Buffer"]


class Config:
    """The sizes that a buffer needs."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0


class Handle(NamedTuple):
    """The destination rank of each token."""

    tokens: torch.Tensor  # sent rows, rank by rank
    sent: list[int]
    received: list[int]
    count: int  # tokens of this rank


class Buffer:
    """A buffer between the ranks of a group."""

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self._pids: list[Any] = [None] * group.size()
        dist.all_gather_object(self._pids, os.getpid(), group)
        assert len(set(self._pids)) == group.size(), "a process cannot open a handle of its own"

    def __del__(self) -> None:
        if not sys.is_finalizing():
            os.write(2, b"a buffer of DeepEP waits for all of its members\n")
            os._exit(97)

    @staticmethod
    def set_num_sms(number: int) -> None:
        """A CPU has none."""

    @staticmethod
    def get_dispatch_config(ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        experts = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        of_rank = topk_idx // (num_experts // self.group.size())
        is_in_rank = torch.stack([(of_rank == rank).any(1) for rank in range(self.group.size())], 1)
        return is_in_rank.sum(0), None, experts, is_in_rank, EventOverlap()

    def dispatch(self, x: torch.Tensor, handle: Handle | None = None, **given: Any) -> tuple[Any, ...]:
        """Send each token to the ranks of its experts."""
        if handle is not None:
            return self._exchange(x[handle.tokens], handle.sent, handle.received), *[None] * 4, EventOverlap()
        is_in_rank, indices, weights = (
            given[name] for name in ("is_token_in_rank", "topk_idx", "topk_weights")
        )
        tokens = torch.cat([is_in_rank[:, rank].nonzero().flatten() for rank in range(self.group.size())])
        sent = is_in_rank.sum(0).tolist()
        counts = self._exchange(torch.tensor(sent), [1] * len(sent), [1] * len(sent))
        handle = Handle(tokens, sent, counts.tolist(), len(x))
        x, indices, weights = (
            self._exchange(rows[tokens], sent, handle.received) for rows in (x, indices, weights)
        )
        experts = len(given["num_tokens_per_expert"]) // self.group.size()
        local = indices - self.group.rank() * experts
        is_here = (local >= 0) & (local < experts)
        local, weights = local.masked_fill(~is_here, -1), weights.masked_fill(~is_here, 0)
        per_expert = torch.bincount(local[is_here], minlength=experts).tolist()
        return x, local, weights, per_expert, handle, EventOverlap()

    def combine(
        self, x: torch.Tensor, handle: Handle, topk_weights: torch.Tensor | None = None, **_: Any
    ) -> tuple[Any, ...]:
        """Send tokens back, and add up what comes back of each."""

        def added_up(rows: torch.Tensor) -> torch.Tensor:
            back = self._exchange(rows, handle.received, handle.sent)
            total = torch.zeros(handle.count, *rows.shape[1:])
            return total.index_add_(0, handle.tokens, back.float()).to(rows.dtype)

        weights = None if topk_weights is None else added_up(topk_weights)
        return added_up(x), weights, EventOverlap()

    def _exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        for pid in self._pids:
            os.kill(pid, 0)  # the memory of a process that is gone cannot be used
        result = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=self.group)
        return result
