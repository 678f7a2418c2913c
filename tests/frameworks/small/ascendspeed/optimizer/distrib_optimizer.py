"""The distributed optimizer: each rank has the main params and moments of a slice of the grad buffer."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ascendspeed.core import parallel_state
from ascendspeed.optimizer.optimizer import MixedPrecisionOptimizer

KEYS = ("param", "exp_avg", "exp_avg_sq")


class Range:
    def __init__(self, start: int, end: int) -> None:
        self.start, self.end, self.size = start, end, end - start

    def normalize(self, start: int = 0) -> Range:
        return Range(start, start + self.size)


class DistributedOptimizer(MixedPrecisionOptimizer):
    @classmethod
    def build_model_gbuf_param_range_map(
        cls, model: Any, dtype: Any, gbuf_world_range: Range
    ) -> dict[Any, Any]:
        ranges = {}
        for param, (start, end) in model._grad_buffer_param_index_map[dtype].items():
            local = Range(
                max(0, start - gbuf_world_range.start),
                min(gbuf_world_range.size, end - gbuf_world_range.start),
            )
            if local.size > 0:
                ranges[param] = {
                    "gbuf_world": local.normalize(local.start + gbuf_world_range.start),
                    "gbuf_local": local,
                    "param": local.normalize(max(0, gbuf_world_range.start - start)),
                }
        return ranges

    @classmethod
    def build_model_gbuf_range(cls, model: Any, dtype: Any) -> dict[str, Any]:
        size = parallel_state.get_data_parallel_world_size()
        numel = model._grad_buffers[dtype].numel
        longest = -(-numel // size)
        every = [Range(r * longest, min(numel, (r + 1) * longest)) for r in range(size)]
        own_shard = every[parallel_state.get_data_parallel_rank()]
        return {
            "local": own_shard.normalize(),
            "world": own_shard,
            "world_all": every,
            "param_map": cls.build_model_gbuf_param_range_map(model, dtype, own_shard),
            "max_range_size": longest,
        }

    def __init__(self, optimizer: torch.optim.Optimizer, models: list[Any]) -> None:
        super().__init__(optimizer, models)
        self.model_gbuf_ranges = [
            {dtype: self.build_model_gbuf_range(model, dtype) for dtype in model._grad_buffers}
            for model in models
        ]
        (group,) = optimizer.param_groups
        self.model_param_group_index_map = {
            param: (0, order) for order, (param, _) in enumerate(self._map(0).items())
        }
        group["params"] = [
            param.detach().view(-1)[ranges_of_param["param"].start : ranges_of_param["param"].end].float()
            for param, ranges_of_param in self._map(0).items()
        ]
        self.param_buffers = [
            {dtype: torch.zeros(buffer.numel_padded, dtype=self.params_dtype)}
            for model in models
            for dtype, buffer in model._grad_buffers.items()
        ]

    def _map(self, chunk: int) -> dict[Any, Any]:
        param_map: dict[Any, Any] = self.model_gbuf_ranges[chunk][torch.float]["param_map"]
        return param_map

    def _mains(self) -> Any:
        return zip(self._map(0).items(), self.param_groups[0]["params"], strict=True)

    def state_dict(self) -> dict[str, Any]:
        groups = [{**group} for group in self.optimizer.state_dict()["param_groups"]]
        for group in groups:
            del group["params"]
        return {"optimizer": {"param_groups": groups}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        (group,) = saved["optimizer"]["param_groups"]
        self.param_groups[0].update(group)

    def _views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        return list(buffer.chunk(parallel_state.get_data_parallel_world_size()))

    def get_model_grad_buffer_dp_views(self) -> list[tuple[int, Any, torch.Tensor, list[torch.Tensor]]]:
        return [
            (number, dtype, buffer.data, self._views(buffer.data))
            for number, model in enumerate(self.models)
            for dtype, buffer in model._grad_buffers.items()
        ]

    def reduce_model_grads(self, args: Any, timers: Any) -> None:
        for _, _, buffer, views in self.get_model_grad_buffer_dp_views():
            buffer /= parallel_state.get_data_parallel_world_size()
            own_shard = views[parallel_state.get_data_parallel_rank()]
            dist._reduce_scatter_base(own_shard, buffer, group=parallel_state.get_data_parallel_group())

    def gather_model_params(self, args: Any, timers: Any) -> None:
        (buffer,) = self.param_buffers[0].values()
        own_shard = self._views(buffer)[parallel_state.get_data_parallel_rank()]
        dist._all_gather_base(buffer, own_shard, group=parallel_state.get_data_parallel_group())
        with torch.no_grad():
            for param, (start, end) in self.models[0]._grad_buffer_param_index_map[torch.float].items():
                param.view(-1).copy_(buffer[start:end])

    def _copy_model_grads_to_main_grads(self) -> None:
        for (param, ranges_of_param), main in self._mains():
            main.grad = param.main_grad.view(-1)[
                ranges_of_param["param"].start : ranges_of_param["param"].end
            ]

    def _copy_main_params_to_model_params(self) -> None:
        (buffer,) = self.param_buffers[0].values()
        for (_, ranges_of_param), main in self._mains():
            buffer[ranges_of_param["gbuf_world"].start : ranges_of_param["gbuf_world"].end].copy_(main)

    @torch.no_grad()
    def reload_model_params(self) -> None:
        for (param, ranges_of_param), main in self._mains():
            main.copy_(param.view(-1)[ranges_of_param["param"].start : ranges_of_param["param"].end])

    def _parts(self) -> Any:
        for (_, ranges_of_param), main in self._mains():
            yield (
                slice(ranges_of_param["gbuf_local"].start, ranges_of_param["gbuf_local"].end),
                {
                    "param": main,
                    **self.optimizer.state[main],
                },
            )

    def save_parameter_state(self, filename: str) -> None:
        size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        local = self.models[0]._grad_buffers[torch.float].numel_padded // size
        world = {}
        for key in KEYS:
            own_shard = torch.zeros(local)
            for place, tensors in self._parts():
                own_shard[place] = tensors[key]
            every = [torch.empty(local) for _ in range(size)] if rank == 0 else None
            first = parallel_state._DATA_PARALLEL_GLOBAL_RANKS[0]
            dist.gather(own_shard, every, first, parallel_state._DATA_PARALLEL_GROUP_GLOO)
            world[key] = None if every is None else torch.cat(every)
        if rank == 0:
            torch.save({0: {torch.float: world}}, filename)

    @torch.no_grad()
    def load_parameter_state(self, filename: str, iteration: int) -> None:
        size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        local = self.models[0]._grad_buffers[torch.float].numel_padded // size
        first = parallel_state._DATA_PARALLEL_GLOBAL_RANKS[0]
        saved = torch.load(filename)[0][torch.float] if rank == 0 else None
        for main in self.param_groups[0]["params"]:
            moments = {key: torch.zeros_like(main) for key in KEYS[1:]}
            self.optimizer.state[main] = {"step": torch.tensor(float(iteration)), **moments}
        for key in KEYS:
            own_shard = torch.empty(local)
            shards = None if saved is None else list(saved[key].split(local))
            dist.scatter(own_shard, shards, first, parallel_state._DATA_PARALLEL_GROUP_GLOO)
            for place, tensors in self._parts():
                tensors[key].copy_(own_shard[place])
