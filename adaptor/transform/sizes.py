"""The parallel sizes of a checkpoint, the folders of its ranks, and the layers of each chunk of a model.

Below: the framework's arguments in a checkpoint that are read, their range, and the refused options.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adaptor.errors import CheckpointError, UnsupportedError
from adaptor.protocol import naming
from adaptor.protocol.framework_options import UNEVEN
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


# The arguments that are read, with their largest values. No model has larger numbers, which would only take
# memory.
_NUMBERS = {
    "num_layers": 1 << 16,
    "num_attention_heads": 1 << 20,
    "make_vocab_size_divisible_by": 1 << 30,
    "tensor_model_parallel_size": 1 << 16,
    "pipeline_model_parallel_size": 1 << 16,
    "data_parallel_size": 1 << 20,
}
_OPTIONAL_NUMBERS = {
    "num_query_groups": 1 << 20,
    "num_experts": 1 << 20,
    "vocab_size": 1 << 32,
    "virtual_pipeline_model_parallel_size": 1 << 16,
    "expert_model_parallel_size": 1 << 16,
    "expert_tensor_parallel_size": 1 << 16,
    "context_parallel_size": 1 << 16,
    "ddp_num_buckets": 1 << 32,
    "ddp_bucket_size": 1 << 50,
}
_FLAGS = (
    "use_distributed_optimizer",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "accumulate_allreduce_grads_in_fp32",
    "group_query_attention",
)
_MOST_RANKS = 1 << 20

# Arguments with which a checkpoint has another content, and their flags. A checkpoint that has one set is
# refused.
_REFUSED = {
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "use_custom_fsdp": "--use-custom-fsdp",
    "use_torch_fsdp2": "--use-torch-fsdp2",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
    "overlap_param_gather_with_optimizer_step": "--overlap-param-gather-with-optimizer-step",
    "multi_latent_attention": "--multi-latent-attention",
    "mtp_num_layers": "--mtp-num-layers",
    "moe_grouped_gemm": "--moe-grouped-gemm",
    "heterogeneous_layers_config_path": "--heterogeneous-layers-config-path",
    "is_hybrid_model": "--is-hybrid-model",
}


def arguments_of(body: Any, path: Path) -> Namespace:
    """Return the checked arguments from the content of a model's file.

    Raises:
        CheckpointError: an argument is missing or out of its range.
        UnsupportedError: the file has no arguments.
    """
    args = body.get("args") if isinstance(body, dict) else None
    if not isinstance(args, Namespace):
        raise UnsupportedError(f"{path}: has no arguments of the framework, from which its sizes are read")
    for name, largest in (_NUMBERS | _OPTIONAL_NUMBERS).items():
        value = getattr(args, name, None)
        least = 1 if name in _NUMBERS else 0
        if value is None and name in _OPTIONAL_NUMBERS:
            continue
        if type(value) is not int or not least <= value <= largest:
            raise _cannot_be(path, name, value, f"a number from {least} to {largest}")
    for name in _FLAGS:
        if type(value := getattr(args, name, None)) is not bool:
            raise _cannot_be(path, name, value, "True or False")
    sizes = Sizes.of(args)
    if max(sizes.tp, sizes.expert_tensor) * sizes.pp * sizes.ep > _MOST_RANKS:
        raise CheckpointError(f"{path}: its arguments say {sizes}; no checkpoint has so many ranks")
    return args


def _cannot_be(path: Path, name: str, value: Any, right: str) -> CheckpointError:
    shown = ascii(value) if type(value) in (int, float, str, bool) else f"a {type(value).__name__}"
    verb = "lack" if value is None else "say"
    description = name if value is None else f"{name}={shown[:40]}"
    return CheckpointError(f"{path}: its arguments {verb} {description}; it must be {right}")


def require_supported(args: Namespace, folder: Path, *, described: bool, weights_only: bool = False) -> None:
    """Refuse a checkpoint that was saved with an option that is not supported.

    Args:
        args: the framework's arguments in the checkpoint.
        folder: of the checkpoint, for messages.
        described: the checkpoint has a layout file.
        weights_only: the optimizer is left out.

    Raises:
        UnsupportedError: names the option.
    """
    for name, option in UNEVEN.items():
        if getattr(args, name, None) and not described:
            raise UnsupportedError(
                f"{folder}: was saved with {option} and has no {naming.LAYOUT}, without which it is not"
                " transformed"
            )
    if reason := untransformable(args, described=True, weights_only=weights_only):
        raise UnsupportedError(f"{folder}: was saved {reason}, which is not transformed")
    sizes = Sizes.of(args)
    if sizes.lack:
        raise UnsupportedError(f"{folder}: was saved with {sizes.lack}")
    has_experts = bool(getattr(args, "num_experts", None)) and not described
    if has_experts and sizes.ep == 1:
        raise UnsupportedError(
            f"{folder}: has experts with an expert-parallel size of 1, where one optimizer has them and all"
            f" else, and no {naming.LAYOUT}; without it only sizes from 2 on are transformed"
        )
    etp = getattr(args, "expert_tensor_parallel_size", None) or sizes.tp
    if has_experts and (etp != sizes.tp or sizes.tp > 1):
        raise UnsupportedError(
            f"{folder}: has experts with TP{sizes.tp} and expert-tensor-parallel size {etp}, and no"
            f" {naming.LAYOUT}; without it experts are transformed only where both are 1"
        )


def untransformable(args: Namespace, *, described: bool, weights_only: bool = False) -> str:
    """Return the option with which a checkpoint cannot be transformed, whatever its sizes; empty: there is
    none.

    Args:
        args: the framework's arguments.
        described: a layout file describes each rank; False: rules lay out source and target.
        weights_only: the optimizer is left out.

    Returns:
        Words that follow `a job` or `was saved`.
    """
    for name, option in {**_REFUSED, **({} if described else UNEVEN)}.items():
        if getattr(args, name, None):
            return f"with {option}"
    if weights_only:
        return ""
    if not args.use_distributed_optimizer:
        return "without --use-distributed-optimizer"
    optimizer = getattr(args, "optimizer", None)
    return "" if optimizer == "adam" else f"with --optimizer {optimizer}"
