"""Opens a checkpoint of the format `torch_dist` for a transform, in the form of a checkpoint of the format
`torch`.

The sharded format has whole tensors in chunks. `ShardedCheckpoint` makes, for each model-parallel rank of the
job that saved, the body of its file in the format `torch`, from records of the chunks. The layout file
describes the rank's part.

The optimizer's state has one of four kinds. Two kinds have a tensor for each param: in its shape, or flat.
The third has the optimizer's buckets, the fourth the whole content of the optimizer's file of the format
`torch`.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

from adaptor.checkpoint import disk, layout_file
from adaptor.checkpoint.layout_file import Entry, JobLayout, OptimizerLayout, RankLayout
from adaptor.errors import CheckpointError, UnsupportedError
from adaptor.protocol import naming
from adaptor.transform import archive, described, sharded_index
from adaptor.transform.described import OF_OPTIMIZER, STATES, WITHOUT_OPTIMIZER, ByParam
from adaptor.transform.records import SIZES, Archive, DType, ScatteredTensor, Stretch
from adaptor.transform.rules import Cut
from adaptor.transform.sharded_index import STATE, StoredChunk, TensorName
from adaptor.transform.sizes import Rank, Sizes, arguments_of

CONFIG, COMMON = "metadata.json", "common.pt"
_LARGEST_CONFIG = 1 << 20
# Kinds of optimizer state, as the framework calls them.
RESHARDABLE, FLAT = "fully_reshardable", "fully_sharded_model_space"
_BUCKETS, _GATHERED = "dp_reshardable", "dp_zero_gather_scatter"
# In the flat kind the main params have another name.
_FLAT_NAMES = {"param": "fp32_param"}


def is_sharded(folder: Path) -> bool:
    """Return whether the checkpoint in `folder` has a sharded format."""
    return (folder / CONFIG).exists()


def fits_any_size(folder: Path) -> bool:
    """Return whether the framework loads the optimizer state in `folder` in other tensor and pipeline
    parallel sizes; True if there is none.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    common = archive.read(_existing(folder / COMMON))
    args = arguments_of(common, folder / COMMON)
    return getattr(args, "no_save_optim", False) or _kind(common, args) not in (_BUCKETS, _GATHERED)


def _metadata(common: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = common.get("content_metadata")
    return metadata if isinstance(metadata, dict) else {}


def _kind(common: Mapping[str, Any], args: Namespace) -> Any:
    """Return the kind of the optimizer's state; versions before 0.13 do not save it."""
    parallel = getattr(args, "ckpt_fully_parallel_save", False)
    return _metadata(common).get("distrib_optim_sharding_type", FLAT if parallel else _GATHERED)


class ShardedCheckpoint:
    """A checkpoint of the format `torch_dist`: its index, the common state of all ranks, its layout file.

    Args:
        folder: of the step.
        step: its number.
        weights_only: leave out the optimizer; the checkpoint need not have one.

    Raises:
        CheckpointError: a file is missing or damaged, or is of another step.
        UnsupportedError: the kind of the checkpoint is not supported.
    """

    def __init__(self, folder: Path, step: int, *, weights_only: bool = False) -> None:
        self._folder = folder
        self._weights_only = weights_only
        _require_backend(folder)
        common = archive.read(_existing(folder / COMMON))
        if not isinstance(common, dict) or common.get("iteration") != step:
            saved_step = common.get("iteration") if isinstance(common, dict) else None
            step_note = f", but of step {saved_step}" if isinstance(saved_step, int) else ""
            raise CheckpointError(f"{folder / COMMON}: is not of step {step}{step_note}")
        self.common: dict[str, Any] = common
        self.args: Namespace = arguments_of(common, folder / COMMON)
        self.sizes = Sizes.of(self.args)
        self._is_numbered = _metadata(common).get("singleton_local_shards") is True
        self._kind = _kind(common, self.args)
        if not weights_only and self._kind not in (RESHARDABLE, FLAT, _BUCKETS, _GATHERED):
            raise UnsupportedError(
                f"{folder}: has optimizer state of the kind {str(self._kind)[:60]}, which is not transformed"
            )
        self.layout = _layout(folder)
        self._index = sharded_index.read(folder)
        self._objects: dict[bytes, Any] = {}

    def body(self, rank: Rank) -> dict[str, Any]:
        """Return the content of the model's file of a rank in the format `torch`.

        Raises:
            CheckpointError: the checkpoint has no optimizer.
        """
        layout = described.by_rank(self.layout)[rank]
        chunks = {chunk: self._chunk(layout, entries) for chunk, entries in layout.chunks.items()}
        common = {key: value for key, value in self.common.items() if key != "content_metadata"}
        if self._weights_only:
            plain = {key: value for key, value in common.items() if key not in OF_OPTIMIZER}
            return {**plain, **chunks, "rng_state": self._random_states(rank)}
        if "optimizer" not in common:
            raise CheckpointError(f"{self._folder / COMMON}: has no optimizer; {WITHOUT_OPTIMIZER}")
        body: dict[str, Any] = {}
        for key, value in common.items():
            if key == "optimizer":
                body |= chunks
                value = self._optimizer(rank, layout)
            body[key] = value
            if key == "opt_param_scheduler":
                body["rng_state"] = self._random_states(rank)
        return body

    def states(self, rank: Rank) -> Sequence[Any]:
        """Return the state of each optimizer of a rank, None where another rank has the state.

        Raises:
            CheckpointError: a part of a state is missing.
        """
        layout = described.by_rank(self.layout)[rank]
        several = len(layout.optimizers) > 1
        read: dict[str, Callable[[RankLayout, OptimizerLayout, str], Any]] = {
            RESHARDABLE: self._by_param,
            FLAT: self._by_param,
            _BUCKETS: self._buckets,
            _GATHERED: self._gathered,
        }
        return [
            read[self._kind](layout, rank_layout, self._prefix(rank, layout, number, several))
            if rank_layout.stored
            else None
            for number, rank_layout in enumerate(layout.optimizers)
        ]

    # The state outside of the optimizer's buffers

    def _chunk(self, layout: RankLayout, entries: Sequence[Entry]) -> dict[str, Any]:
        return OrderedDict(
            (entry.name, self._tensor(layout, entry, "") if entry.dtype else self._object_of(layout, entry))
            for entry in entries
        )

    def _object_of(self, layout: RankLayout, entry: Entry) -> Any:
        """Return the extra state of a module, None without extra state."""
        if entry.layer is None:
            return None
        name = sharded_index.key_of(described.name_of(entry), is_local=False)
        place = TensorName(name, entry.layer, entry.expert, *_counts(layout))
        archive = self._index.objects.get(f"{place.name()}/shard_0_1")
        return None if archive is None else self._object(archive)

    def _optimizer(self, rank: Rank, layout: RankLayout) -> Any:
        """Return the state of the optimizers in the file of the model in the format `torch`."""
        saved = self.common["optimizer"]
        several = len(layout.optimizers) > 1
        states_by_number = saved if several else {0: saved}
        if not isinstance(states_by_number, dict) or list(states_by_number) != list(
            range(len(layout.optimizers))
        ):
            raise CheckpointError(
                f"{self._folder / COMMON}: is not the state of {len(layout.optimizers)} optimizers, as its"
                f" {naming.LAYOUT} says"
            )
        optimizers = []
        for number, optimizer_state in states_by_number.items():
            prefix = self._prefix(rank, layout, number, several)
            names = [name for name in self._index.objects if name.startswith(prefix) and name.endswith("_1")]
            own_archives = {
                name.removeprefix(prefix).partition("/")[0]: self._index.objects[name]
                for name in names
                if not name.removeprefix(prefix).startswith(("per_bucket_numel", "param_state"))
            }
            plain = optimizer_state if isinstance(optimizer_state, dict) else {}
            optimizers.append(
                {key: value for key, value in plain.items() if not key.startswith("param_state")}
                | {key: self._object(archive) for key, archive in own_archives.items()}
            )
        return optimizers if several else optimizers[0]

    def _random_states(self, rank: Rank) -> Any:
        name = f"rng_state/shard_{rank.pp}.{rank.tp}_{self.sizes.pp}.{self.sizes.tp}"
        archive = self._index.objects.get(name)
        return [] if archive is None else self._object(archive)

    def _object(self, place: Archive) -> Any:
        """Return an object. Equal small objects, as of modules without a state, are read once."""
        data = _bytes(place) if place.length < _SMALL else b""
        if not data or data not in self._objects:
            value = archive.read_inside(place)
            if not isinstance(value, list) or len(value) != 1:
                raise CheckpointError(f"{place.path}: the object at byte {place.begin} is no list of one")
            if not data:
                return value[0]
            self._objects[data] = value[0]
        return self._objects[data]

    # Tensors

    def _tensor(self, layout: RankLayout, entry: Entry, front: str) -> ScatteredTensor:
        """Return a tensor in its own shape; `front` is the optimizer's prefix of its name."""
        place = TensorName(entry.key, entry.layer, entry.expert, *_counts(layout))
        cut = Cut(entry.axis, max(1, len(entry.pieces)), entry.padded)
        stretches: list[Stretch] = []
        dtype = "float32" if front else entry.dtype
        for region in sharded_index.regions(
            place, entry.whole, cut, entry.pieces, numbered=self._is_numbered
        ):
            chunk = self._chunk_at(front + region.name, dtype, region.whole_shape, region.offset)
            if chunk.shape != region.shape:
                raise self._other_chunks(front + region.name)
            stretches.append(Stretch(chunk.archive, 0, prod(region.shape) * SIZES[dtype]))
        return _scattered(dtype, entry.shape, stretches)

    def _flat(self, layout: RankLayout, entry: Entry, kind: str) -> ScatteredTensor:
        place = TensorName(entry.key, entry.layer, entry.expert, *_counts(layout))
        cut = Cut(entry.axis, max(1, len(entry.pieces)), entry.padded)
        stretches: list[Stretch] = []
        for key, at, length in sharded_index.fragments(place, entry.shape, entry.whole, cut, entry.pieces):
            name = f"{STATE}{_FLAT_NAMES.get(kind, kind)}.{key}"
            tensor = self._index.tensors.get(name)
            if tensor is None:
                raise self._missing(name)
            own_chunks = {offset[-1]: chunk for offset, chunk in tensor.chunks.items() if offset[:-1] == at}
            stretches += self._line(name, own_chunks, length)
        return _scattered("float32", entry.shape, stretches)

    def _line(self, name: str, chunks: Mapping[int, StoredChunk], length: int) -> list[Stretch]:
        """Return the stretches of flat `chunks`, which have to make up `length` elements."""
        size = SIZES["float32"]
        reached = 0
        stretches = []
        for offset, chunk in sorted(chunks.items()):
            if offset != reached:
                break
            stretches.append(Stretch(chunk.archive, 0, chunk.shape[-1] * size))
            reached += chunk.shape[-1]
        if reached != length:
            raise CheckpointError(
                f"{self._index.path}: {name[:200]} has {reached} elements in one piece; by its"
                f" {naming.LAYOUT} it would have {length}"
            )
        return stretches

    def _chunk_at(
        self, name: str, dtype: str, whole_shape: tuple[int, ...], offset: tuple[int, ...]
    ) -> StoredChunk:
        tensor = self._index.tensors.get(name)
        if tensor is None:
            raise self._missing(name)
        if (tensor.dtype, tensor.shape) != (dtype, whole_shape):
            raise CheckpointError(
                f"{self._index.path}: {name[:200]} is {tensor.dtype} {list(tensor.shape)}; by its"
                f" {naming.LAYOUT} it would be {dtype} {list(whole_shape)}"
            )
        if offset not in tensor.chunks:
            raise self._other_chunks(name)
        return tensor.chunks[offset]

    def _missing(self, name: str) -> CheckpointError:
        return CheckpointError(f"{self._index.path}: has no {name[:200]}, which its {naming.LAYOUT} has")

    def _other_chunks(self, name: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self._index.path}: {name[:200]} is in other chunks than {self.sizes} of its {naming.LAYOUT}"
        )

    # The optimizer's state

    def _by_param(self, layout: RankLayout, optimizer: OptimizerLayout, prefix: str) -> ByParam:
        read = self._flat if self._kind == FLAT else self._state_of
        entries = {
            (key, entry.name): entry
            for key, chunk_entries in layout.chunks.items()
            for entry in chunk_entries
        }
        return ByParam(
            (described.name_of(entry), kind, read(layout, entry, kind))
            for buffer in optimizer.buffers
            for buffer_entry in buffer.params
            for entry in [entries[buffer_entry.chunk, buffer_entry.name]]
            for kind in STATES
        )

    def _state_of(self, layout: RankLayout, entry: Entry, kind: str) -> ScatteredTensor:
        return self._tensor(layout, entry, f"{STATE}{kind}.")

    def _buckets(self, layout: RankLayout, optimizer: OptimizerLayout, prefix: str) -> dict[Any, Any]:
        state: dict[Any, Any] = {}
        for number, buffer in enumerate(optimizer.buffers):
            dtypes = tuple(DType(name) for name in buffer.dtypes)
            shown = ", ".join(f"torch.{name}" for name in buffer.dtypes)
            tensors: dict[str, Any] = {"numel_unpadded": buffer.numel}
            for kind in STATES:
                stretches: list[Stretch] = []
                for bucket in count():
                    name = f"{prefix}gbuf_idx_{number}.dtype_({shown}).bucket_idx_{bucket}.{kind}"
                    tensor = self._index.tensors.get(name)
                    if tensor is None:
                        break
                    if tensor.dtype != "float32" or len(tensor.shape) != 1:
                        raise CheckpointError(f"{self._index.path}: {name} is no line of float32")
                    own_chunks = {offset[0]: chunk for offset, chunk in tensor.chunks.items()}
                    stretches += self._line(name, own_chunks, tensor.shape[0])
                numel = sum(stretch.bytes for stretch in stretches) // SIZES["float32"]
                tensors[kind] = _scattered("float32", (numel,), stretches)
            state[number] = {dtypes: tensors}
        return state

    def _gathered(self, layout: RankLayout, optimizer: OptimizerLayout, prefix: str) -> Any:
        name = f"{prefix}param_state/shard_0_1"
        if name not in self._index.objects:
            raise self._missing(name)
        return self._object(self._index.objects[name])

    def _prefix(self, rank: Rank, layout: RankLayout, number: int, several: bool) -> str:
        """Return the prefix of the names of an optimizer's state outside of model space."""
        group = rank.tp + self.sizes.tp * rank.pp
        if number:  # of experts
            own_expert_rank = self.sizes.expert_rank(rank)
            group = own_expert_rank + self.sizes.expert_tensor * (rank.ep + self.sizes.ep * rank.pp)
        chained = f"chained_{number}." if several else ""
        return f"{chained}optimizer.distributed.dp_group_idx_{group}."


_SMALL = 4096  # bytes of an object that is kept


def _scattered(dtype: str, shape: tuple[int, ...], stretches: Sequence[Stretch]) -> ScatteredTensor:
    path = stretches[0].archive.path if stretches else Path()
    return ScatteredTensor(path, 0, dtype, shape, tuple(stretches))


def _counts(layout: RankLayout) -> tuple[int, int]:
    layers, experts = (layout.args.get(name) for name in ("num_layers", "num_experts"))
    return (layers if isinstance(layers, int) else 0, experts if isinstance(experts, int) else 0)


def _bytes(place: Archive) -> bytes:
    try:
        with place.path.open("rb") as file:
            file.seek(place.begin)
            return file.read(place.length)
    except OSError as error:
        raise CheckpointError(f"{place.path}: {error.strerror or error}") from error


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise CheckpointError(
            f"{path}: missing (Megatron-core after 0.18 has its content elsewhere, which is not read)"
        )
    return path


def _require_backend(folder: Path) -> None:
    path = folder / CONFIG
    try:
        config = json.loads(disk.read(path, _LARGEST_CONFIG))
        backend = config["sharded_backend"]
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: says no sharded format of Megatron-core ({error})") from error
    if backend != "torch_dist":
        raise UnsupportedError(
            f"{folder}: has the sharded format {str(backend)[:40]}; only torch_dist is read"
        )


def _layout(folder: Path) -> JobLayout:
    path = folder / naming.LAYOUT
    if not path.exists():
        raise UnsupportedError(
            f"{folder}: has no {naming.LAYOUT}, without which the format torch_dist is not read; make it"
            f" with the command of the job that saved: `ttprun --ttp-layout-only {path} ...`"
        )
    return layout_file.read(path)
