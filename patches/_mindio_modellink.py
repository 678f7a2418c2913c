"""What `mindio_ttp.modellink` has, for a ModelLink (af1347) that was edited after the guide.

The guide has the framework make the groups, take this optimizer in the place of its own, and call its own
`save_checkpoint` in a dump. What the shards are is in `_ascendspeed_shards`, as for a patched ModelLink.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from ascendspeed.core import parallel_state
from ascendspeed.optimizer.distrib_optimizer import DistributedOptimizer

from adaptor.mindio.optimizer import ReplicaOptimizer
from adaptor.patches import _ascendspeed_shards as shards
from adaptor.patches import _mindio_groups as groups

_SAVED = ("param", "exp_avg", "exp_avg_sq")


class TTPReplicaOptimizer(ReplicaOptimizer, DistributedOptimizer):  # type: ignore[misc]
    """The framework's distributed optimizer, each half of the data-parallel group with all of its state.

    What is its own is called `_ttp_...`, so that nothing of the framework is meant by the same name.
    """

    def __init__(self, *args: Any) -> None:
        """As the framework's, and at the end whether there is a local copy, which the engine knows."""
        *own, _ = args
        groups.half()
        self._ttp_copied: dict[Any, dict[str, torch.Tensor]] = {}
        super().__init__(*own)

    @classmethod
    def build_model_gbuf_range(cls, model: Any, dtype: Any) -> dict[str, Any]:
        return shards.ranges(cls, model, dtype)

    def reduce_model_grads(self, args: Any, timers: Any) -> None:
        if args.foldx_mode is not None:  # which has reduced whole buffers by now
            super().reduce_model_grads(args, timers)
            return
        shards.halve(self)
        with shards.in_charge():
            super().reduce_model_grads(args, timers)
            shards.add_twins(self)

    def gather_model_params(self, args: Any, timers: Any) -> None:
        with shards.in_charge():
            super().gather_model_params(args, timers)

    def count_zeros(self) -> Any:
        return super().count_zeros() / shards.HALVES

    def load_parameter_state(self, filename: str, iteration: int) -> None:
        with shards.in_charge():
            super().load_parameter_state(filename, iteration)

    def save_parameter_state(self, filename: str) -> None:
        if self.error_dump:
            self._ttp_dump_parameter_state(filename)
        elif groups.half().first:
            with shards.in_charge():
                super().save_parameter_state(filename)

    def need_write_file(self) -> bool:
        """Whether this rank is the one of its data-parallel group that writes."""
        if self.error_dump:
            return bool(self.save_args["rank"] == dist.get_rank())
        return bool(parallel_state.get_data_parallel_rank() == 0)

    def copy_state(self) -> None:
        self._ttp_copied = {main: self._ttp_clones(main) for main in self._ttp_mains()}

    def _ttp_clones(self, main: Any) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._ttp_live(main).items()}

    def _ttp_mains(self) -> list[Any]:
        return [main for group in self.optimizer.param_groups for main in group["params"]]

    def _ttp_live(self, main: Any) -> dict[str, torch.Tensor]:
        state = self.optimizer.state[main]
        return {"param": main, **{name: state[name] for name in _SAVED[1:] if name in state}}

    def _ttp_saved(self, main: Any) -> dict[str, torch.Tensor]:
        """Of the step that is dumped."""
        past = self.current_step > self.save_args["step"]
        return self._ttp_copied[main] if past else self._ttp_live(main)

    def _ttp_dump_parameter_state(self, filename: str) -> None:
        """Gather the shards of `rank_list`, each of another one, and write them as the framework does.

        The writer's model gets its weights from them: its own may be those of an earlier step.
        """
        ranks: Sequence[int] = self.save_args["rank_list"]
        group = dist.new_group(sorted(ranks), backend="gloo", use_local_synchronization=True)
        size, ranks_of_all = len(groups.half().ranks), groups.get_dp_rank_list()
        by_shard = sorted(ranks, key=lambda rank: ranks_of_all.index(rank) % size)
        state: dict[int, dict[Any, dict[str, torch.Tensor]]] = {}
        for number, ranges in enumerate(self.model_gbuf_ranges):
            state[number] = {}
            for dtype, where in ranges.items():
                own = self._ttp_shard(number, dtype, where)
                state[number][dtype] = self._ttp_gathered(own, sorted(ranks), by_shard, group)
        if self.need_write_file():
            self._ttp_give_weights(state)
            torch.save(state, filename)

    def _ttp_shard(self, number: int, dtype: Any, where: Any) -> dict[str, torch.Tensor]:
        size = self.models[number]._grad_buffers[dtype].numel_padded // len(groups.half().ranks)
        shard = {name: torch.zeros(size) for name in _SAVED}
        for param, places in where["param_map"].items():
            group, order = self.model_param_group_index_map[param]
            saved = self._ttp_saved(self.optimizer.param_groups[group]["params"][order])
            local = places["gbuf_local"]
            for name, tensor in shard.items():
                tensor[local.start : local.end].copy_(saved[name].detach().cpu())
        return shard

    def _ttp_gathered(
        self, own: dict[str, torch.Tensor], ranks: Sequence[int], by_shard: Sequence[int], group: Any
    ) -> dict[str, torch.Tensor]:
        whole = {}
        for name, tensor in own.items():
            parts = [torch.empty_like(tensor) for _ in ranks] if self.need_write_file() else None
            dist.gather(tensor, parts, self.save_args["rank"], group)
            if parts is not None:
                whole[name] = torch.cat([parts[ranks.index(rank)] for rank in by_shard])
        return whole

    def _ttp_give_weights(self, state: dict[int, dict[Any, dict[str, torch.Tensor]]]) -> None:
        with torch.no_grad():
            for number, model in enumerate(self.models):
                for dtype, places in model._grad_buffer_param_index_map.items():
                    for param, (start, end) in places.items():
                        param.view(-1).copy_(state[number][dtype]["param"][start:end])
