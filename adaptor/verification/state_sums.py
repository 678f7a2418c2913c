"""Takes the sums of the state in the memory of a rank, for `agreed_state`.

Sums are `placed_sums` of bits: of the main params and moments as float32, and of the weights in their own
dtype. The sums run over params by name, so buckets, shards and padding have no influence.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import xxhash

from adaptor.checkpoint import shards, step_record
from adaptor.checkpoint.training_state import TrainingState, unwrapped
from adaptor.checkpoint.weights import is_quantized
from adaptor.replica import optimizer_state, twin
from adaptor.replica.mirror import Mirror
from adaptor.verification.agreed_state import MASK, PARAM, WEIGHT, HeldState, ShardSums
from adaptor.verification.checksums import random_sum
from adaptor.verification.placed_sums import name_factor, placed_sum
from adaptor.verification.transcript import SUM_DIGITS

Sums: TypeAlias = dict[str, int]
# Returns elements of a weight, from the param, its main param, and their first and last place in the param.
Weight: TypeAlias = Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]
# Of params in a buffer: begin and end in the world tensor (`shards`), the param, and its name.
Places: TypeAlias = list[tuple[int, int, torch.Tensor, str]]


def names_of(state: TrainingState) -> dict[int, str]:
    """Return the name of each param of the model, by its id."""
    return {
        id(param): f"{key}.{name}"
        for key, chunk in state.chunks.items()
        for name, param in unwrapped(chunk).named_parameters()
    }


def layout_of(state: TrainingState) -> str:
    """Return a hash of the names, shapes and dtypes of the params of this rank."""
    texts = [
        f"{key}.{name} {tuple(param.shape)} {param.dtype}\n"
        for key, chunk in state.chunks.items()
        for name, param in unwrapped(chunk).named_parameters()
    ]
    return str(xxhash.xxh3_64_hexdigest("".join(sorted(texts)).encode()))


def places_of(optimizer: Any, number: int, names: Mapping[int, str]) -> Places:
    """Return the places of the params in buffer `number` of a distributed optimizer, in order."""
    buffer = optimizer.buffers[number]
    shifts = [bucket.offset - bucket.world for bucket in shards.buckets_of(optimizer, buffer)]
    return sorted(
        (
            (start - shifts[bucket], end - shifts[bucket], param, names[id(param)])
            for param, (start, end, bucket) in buffer.param_index_map.items()
        ),
        key=lambda place: place[0],
    )


def sum_between(tensor: torch.Tensor, begin: int, places: Places) -> int:
    """Return the sum of elements of a world tensor from `begin` on; padding between params is left out."""
    flat, total = tensor.detach().reshape(-1), 0
    end = begin + flat.numel()
    for first, last, _, name in places[bisect.bisect_right(places, begin, key=_end) :]:
        low, high = max(first, begin), min(last, end)
        if low >= high:
            break
        total += name_factor(name) * placed_sum(flat[low - begin : high - begin].float(), low - first)
    return total & MASK


def sums_of_world(optimizer: Any, world: Mapping[Any, Any], names: Mapping[int, str]) -> Sums:
    """Return the sums of a gathered state, in the form of `shards.gather`."""
    sums: Sums = {}
    for number in range(len(optimizer.buffers)):
        places = places_of(optimizer, number, names)
        (tensors,) = world[number].values()
        for key in shards.KEYS:
            sums[key] = sums.get(key, 0) + sum_between(tensors[key], 0, places) & MASK
    return sums


def sums_of_shard(
    optimizer: Any, index: int, reader: Callable[[int, int], shards.Part], names: Mapping[int, str],
    weight: Weight | None = None,
) -> Sums:  # fmt: skip
    """Return the sums of shard `index` of a distributed optimizer, by key.

    Args:
        optimizer: of the chain.
        index: of the shard.
        reader: of the shard, by buffer and bucket (`shards.part_of`).
        names: of the params, by id.
        weight: returns the elements of a weight; None: without a sum of weights.
    """
    sums: Sums = {}
    for number, buffer in enumerate(optimizer.buffers):
        places = places_of(optimizer, number, names)
        for bucket in shards.buckets_of(optimizer, buffer):
            begin, _ = bucket.extent(index)
            for start, _, tensors in reader(number, bucket.index):
                for key in shards.KEYS:
                    if key in tensors:
                        part = sum_between(tensors[key], begin + start, places)
                        sums[key] = sums.get(key, 0) + part & MASK
                if weight is not None:
                    main = tensors[PARAM]
                    first, _, param, name = _place_of(begin + start, places)
                    low = begin + start - first
                    values = weight(param, main, low, low + main.numel())
                    part = name_factor(name) * placed_sum(values, low)
                    sums[WEIGHT] = sums.get(WEIGHT, 0) + part & MASK
    return dict.fromkeys((*shards.KEYS, *([WEIGHT] if weight else [])), 0) | sums


def _end(place: tuple[int, int, torch.Tensor, str]) -> int:
    return place[1]


def _place_of(begin: int, places: Places) -> tuple[int, int, torch.Tensor, str]:
    return places[bisect.bisect_right(places, begin, key=_end)]


def _live_weight(param: torch.Tensor, main: torch.Tensor, first: int, last: int) -> torch.Tensor:
    return param.detach().reshape(-1)[first:last]


def rounding_of(optimizer: Any) -> Weight:
    """Return a function that makes weights of the main params of an optimizer, as its update does."""
    storage = optimizer_state.storage_of(optimizer)
    cast = torch.Tensor.to if storage is None else storage.cast
    return lambda param, main, first, last: cast(main.detach(), param.dtype)


def is_plain(state: TrainingState) -> bool:
    """Return whether all weights have as many bits as their dtype says; other weights have no sums."""
    return not any(is_quantized(param) for chunk in state.model for param in chunk.parameters())


def sums_of_whole(optimizer: Any, live: Any, names: Mapping[int, str], *, is_rounded: bool = False) -> Sums:
    """Return the sums of an optimizer whose state every data-parallel rank has in full.

    If the weights are the main params, their sums are sums of weights alone.

    Args:
        optimizer: of the chain.
        live: the optimizer that updates the model: `optimizer` itself, or its original.
        names: of the params of the model, by id.
        is_rounded: whether weights are made of main params, because live weights may be half updated.
    """
    torchs = getattr(optimizer, "optimizer", None)
    if torchs is None:
        return {}
    sums: Sums = {}
    for main, param, is_apart in whole_params(optimizer, live):
        factor = name_factor(names[id(param)])
        weight = main.detach().to(param.dtype) if is_rounded else param
        tensors = {WEIGHT: weight, **optimizer_state.state_values(torchs, main)}
        if is_apart:
            tensors[PARAM] = main
        for key, value in tensors.items():
            if (
                isinstance(value, torch.Tensor)
                and value.numel() == main.numel()
                and value.shape == main.shape
            ):
                part = factor * placed_sum(value if key == WEIGHT else value.float())
                sums[key] = sums.get(key, 0) + part & MASK
    return sums


def whole_params(optimizer: Any, live: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """Return the main params of an optimizer without shards, in its order, each with its weight, and whether
    the weight has other memory than the main param in training.
    """
    weights = {
        id(main): param
        for params, mains in zip(
            getattr(live, "float16_groups", []), getattr(live, "fp32_from_float16_groups", []), strict=True
        )
        for param, main in zip(params, mains, strict=True)
    }
    for main, original in zip(twin.params(optimizer.optimizer), twin.params(live.optimizer), strict=True):
        yield main, weights.get(id(original), original), id(original) in weights


def trained_params(state: TrainingState) -> dict[str, torch.Tensor]:
    """Return the weights that the optimizers of this rank train, by name."""
    names, trained = names_of(state), dict[str, torch.Tensor]()
    for optimizer, live, _ in state.chained:
        if shards.is_sharded(optimizer):
            for number in range(len(optimizer.buffers)):
                trained |= {name: param for _, _, param, name in places_of(optimizer, number, names)}
        elif not shards.is_stub(optimizer):
            trained |= {names[id(param)]: param for _, param, _ in whole_params(optimizer, live)}
    return trained


def updates_of(optimizer: Any) -> int | None:
    """Return the count of updates of the optimizers of a chain, if equal; else None."""
    counts = set()
    for torchs in step_record.inner(optimizer):
        counts |= {int(group["step"]) for group in torchs.param_groups if "step" in group}
        counts |= {int(state["step"]) for state in torchs.state.values() if "step" in state}
    return counts.pop() if len(counts) == 1 else None


def random_key(states: Mapping[str, Any], place: int | None = None) -> str:
    """Return the sum of random states, in the form in which a framework stores them.

    Args:
        states: of a rank.
        place: the data-parallel rank, where each has states of its own (`PLACE:SUM`).
    """
    total = random_sum(states)[:SUM_DIGITS]
    return total if place is None else f"{place}:{total}"


def random_keys(states: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the sums of saved random states: of one rank, or of each data-parallel rank."""
    has_places = len(states) > 1
    return tuple(random_key(state, place if has_places else None) for place, state in enumerate(states))


def held_by(
    state: TrainingState,
    mirrors: Sequence[Mirror | None],
    shares: Sequence[Any],
    *,
    whole_weights: bool = False,
) -> HeldState:
    """Return the sums of the state of this rank; never raise, because the other ranks wait for the answer.

    Args:
        state: of the rank.
        mirrors: per optimizer of the chain: the copy of another rank's shard; or empty.
        shares: the shards of the rank (`placement`).
        whole_weights: whether all weights of this rank are summed, besides the weights of its own shard.
    """
    try:
        with torch.no_grad():
            return _held_by(state, mirrors, shares, whole_weights=whole_weights)
    except Exception as error:
        return HeldState(state.folder, problem=f"no sums could be taken: {type(error).__name__}: {error}")


def _held_by(
    state: TrainingState, mirrors: Sequence[Mirror | None], shares: Sequence[Any], *, whole_weights: bool
) -> HeldState:
    names = names_of(state)
    has_weights = is_plain(state)
    all_sums, offset = [], 0
    for position, (optimizer, live, _) in enumerate(state.chained):
        index, count = shards.shard_of(optimizer)
        by_index: dict[int, Sums] = {}
        if shards.is_sharded(optimizer):
            weight = _live_weight if has_weights else None
            by_index[index] = sums_of_shard(
                optimizer, index, lambda *place, of=optimizer: shards.part_of(of, *place), names, weight
            )
            mirror = mirrors[position] if mirrors else None
            if mirror is not None:
                by_index[mirror.index] = sums_of_shard(optimizer, mirror.index, mirror.shard, names)
        else:
            by_index[0] = {} if shards.is_stub(optimizer) else sums_of_whole(optimizer, live, names)
        for number, sums in by_index.items():
            own_shares = [share for share in shares if share.index == offset + number]
            groups = tuple(share.group for share in own_shares)
            total = next((share.count for share in own_shares), count)
            all_sums.append(ShardSums(groups, offset + number, total, sums))
        offset += count
    weights = None
    if whole_weights and has_weights:
        trained = trained_params(state)
        weights = sum(name_factor(name) * placed_sum(param) for name, param in trained.items()) & MASK
    updates = updates_of(state.optimizer)
    return HeldState(state.folder, layout_of(state), updates, tuple(all_sums), weights=weights)
