"""The parallel sizes of a checkpoint, the folders of its ranks, and the layers of each chunk of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from adaptor.errors import UnsupportedError
from adaptor.protocol import naming
from adaptor.setting_values import Setting


@dataclass(frozen=True, order=True)
class Rank:
    """A model-parallel rank."""

    tp: int
    pp: int
    ep: int

    def __str__(self) -> str:
        return f"tp={self.tp},pp={self.pp},ep={self.ep}"


@dataclass(frozen=True)
class Chunk:
    """A part of the model on one rank.

    Attributes:
        key: of its state in the file
        first: the chunk has the embedding
        last: the chunk has the output layer
        layers: of the whole model, from 0
    """

    key: str
    first: bool
    last: bool
    layers: range


@dataclass(frozen=True)
class Sizes:
    """Parallel sizes: tensor, pipeline, virtual pipeline (chunks of each stage), expert, data.

    Attributes:
        etp: tensor-parallel size of experts; None: `tp`
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    dp: int = 1
    etp: int | None = None

    def __post_init__(self) -> None:
        if self.etp == self.tp:  # so that equal sizes are equal
            object.__setattr__(self, "etp", None)

    @classmethod
    def of(cls, args: Any) -> Sizes:
        """Return the sizes in the arguments of a checkpoint."""
        has_experts = bool(getattr(args, "num_experts", None))
        return cls(
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            vpp=getattr(args, "virtual_pipeline_model_parallel_size", None) or 1,
            ep=getattr(args, "expert_model_parallel_size", None) or 1,
            dp=args.data_parallel_size,
            etp=getattr(args, "expert_tensor_parallel_size", None) if has_experts else None,
        )

    def __str__(self) -> str:
        further_sizes = "".join(
            f" {name.upper()}{size}" for name, size in (("vpp", self.vpp), ("ep", self.ep)) if size > 1
        )
        if self.expert_tensor != self.tp:
            further_sizes += f" ETP{self.expert_tensor}"
        return f"TP{self.tp} PP{self.pp}{further_sizes}"

    @property
    def ranks(self) -> list[Rank]:
        """Return all model-parallel ranks with a folder, in the order of their numbers."""
        return [
            Rank(number % self.tp, pp, number // self.expert_tensor)
            for pp in range(self.pp)
            for number in range(self.expert_tensor * self.ep)
        ]

    @property
    def expert_tensor(self) -> int:
        """Return the tensor-parallel size of experts."""
        return self.etp or self.tp

    def expert_rank(self, rank: Rank) -> int:
        """Return the number of a rank among the ranks that share its experts' tensors."""
        return (rank.tp - rank.ep * self.expert_tensor) % self.tp

    def replica(self, rank: Rank) -> int:
        """Return which copy of the parameters outside of experts a rank has; the optimizer of copy 0 is
        saved.
        """
        return (rank.ep * self.expert_tensor + self.expert_rank(rank)) // self.tp

    @property
    def lack(self) -> str:
        """Return why the folders lack a part of the experts; empty if the folders have all experts.

        A folder is named after tensor, pipeline and expert rank.
        """
        etp = self.expert_tensor
        if self.tp % etp == 0 and etp * self.ep % self.tp == 0:
            return ""
        return (
            f"expert-tensor-parallel size {etp} with TP{self.tp} and EP{self.ep}, where the framework's"
            f" folders lack a part of the model; it must be a divisor of {self.tp} that times {self.ep} is a"
            f" multiple of {self.tp}"
        )

    def folder(self, rank: Rank) -> str:
        """Return the folder of a rank, as the framework names it."""
        return naming.model_parallel_folder(
            rank.tp, rank.pp if self.pp > 1 else None, rank.ep if self.ep > 1 else None
        )

    def chunks(self, layers: int, stage: int) -> list[Chunk]:
        """Return the chunks of a pipeline stage of a model with so many `layers`.

        Raises:
            UnsupportedError: the number of chunks of all stages does not divide the number of layers.
        """
        count = self.pp * self.vpp
        if layers % count:
            options = f"--pp {self.pp}" + (f" --vpp {self.vpp}" if self.vpp > 1 else "")
            raise UnsupportedError(f"{options}: {layers} layers are not divisible by {count}")
        layers_per_chunk = layers // count
        return list(self._chunks(layers_per_chunk, stage))

    def _chunks(self, layers_per_chunk: int, stage: int) -> Iterator[Chunk]:
        for number in range(self.vpp):
            place = number * self.pp + stage
            yield Chunk(
                key="model" if self.vpp == 1 else f"model{number}",
                first=place == 0,
                last=place == self.pp * self.vpp - 1,
                layers=range(place * layers_per_chunk, (place + 1) * layers_per_chunk),
            )


@dataclass(frozen=True)
class Reshape:
    """The tensor and pipeline parallel sizes of a model if the sizes of the arguments do not fit.

    Attributes:
        tp, pp: 0 and 0: chosen by the adaptor (`auto`)
    """

    tp: int = 0
    pp: int = 0

    def __str__(self) -> str:
        return f"tp={self.tp},pp={self.pp}" if self.tp else "auto"


def reshape(text: str) -> Reshape | None:
    """Return the value of `no`, `auto` or `tp=2,pp=1`."""
    if text in ("no", "auto"):
        return Reshape() if text == "auto" else None
    match = re.fullmatch(r"tp=([1-9][0-9]{0,4}),pp=([1-9][0-9]{0,4})", text)
    if match is None:
        raise ValueError
    return Reshape(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class ReshapeSettings:
    """The setting of reshaping (`Config.of`)."""

    reshape: Reshape | None


SETTINGS = (
    Setting(
        "reshape",
        "TTP_RESHAPE",
        "no",
        "no, auto or sizes like tp=2,pp=1",
        reshape,
        "a checkpoint in --save that has other tensor, pipeline or expert parallel sizes than this start is"
        " transformed first; with --nnodes MIN:MAX a model that does not fit the nodes that are there gets"
        " these sizes; auto: sizes with which a rank holds about as much as before",
        same_on_all_nodes=True,
        group="Several nodes",
    ),
)
