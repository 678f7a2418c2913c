"""The layouts of the full matrix (tests/integration/matrix.py), and combinations that cannot run on a CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.faults.harness import (
    DP2,
    DP2_LOADERS,
    DP2_OVERLAP,
    DP2_RAMPUP,
    DP2_SGD,
    DP2_WHOLE,
    DP3,
    DP3_OVERLAP,
    DP4,
    EXPERTS,
    MOE_DP2,
    MOE_EP2,
    MOE_EP2_DP2,
    MOE_TP2_EP2,
    OVERLAP,
    PP2_DP2,
    PP2_TP2_DP2,
    TP2_DP1,
    TP2_DP2,
    TP2_DP2_SP,
    TP2_DP3,
    VPP2_DP2,
    VPP2_DP2_OVERLAP,
    Layout,
)

_RECOMPUTE = (
    "--recompute-granularity",
    "full",
    "--recompute-method",
    "uniform",
    "--recompute-num-layers",
    "1",
)
_UNTIED = "--untie-embeddings-and-output-weights"
_ALLTOALL = ("--moe-token-dispatcher-type", "alltoall")
# Experts are split by tensor parallelism like the rest: no two ranks have the same.
MOE_CUT = Layout(
    "moe-tp2-dp2-ep2-cut", 4, tp=2, replica="mirror", extra=(*MOE_EP2.extra, "--sequence-parallel")
)

# With a pipeline, embeddings are tied across stages unless a layout unties them.
LAYOUTS = (
    Layout("dp1", 1),
    DP2,
    DP3,
    DP4,
    Layout("dp5", 5, extra=("--global-batch-size", "10")),
    Layout("dp4-one-micro-batch", 4, extra=("--global-batch-size", "4")),
    Layout("dp4-accumulation", 4, extra=("--global-batch-size", "16")),
    DP2_WHOLE,
    Layout("dp3-whole-optimizer", 3, distributed_optimizer=False, extra=DP3.extra),
    Layout("tp2-dp2-whole-optimizer", 4, tp=2, distributed_optimizer=False),
    DP2_SGD,
    DP2_OVERLAP,
    DP3_OVERLAP,
    DP2_RAMPUP,
    DP2_LOADERS,
    Layout("dp2-recompute", 2, extra=_RECOMPUTE),
    TP2_DP1,
    TP2_DP2,
    TP2_DP3,
    TP2_DP2_SP,
    Layout(
        "tp2-dp2-sequence-recompute",
        4,
        tp=2,
        extra=("--sequence-parallel", "--recompute-granularity", "selective"),
    ),
    Layout("tp2-dp2-overlap", 4, tp=2, extra=OVERLAP),
    Layout("pp2-dp1", 2, pp=2),
    PP2_DP2,
    Layout("pp2-dp2-untied", 4, pp=2, extra=(_UNTIED,)),
    Layout("pp2-dp3", 6, pp=2, extra=DP3.extra),
    VPP2_DP2,
    Layout("vpp2-dp2-overlap", 4, pp=2, extra=(*VPP2_DP2.extra, *OVERLAP)),
    VPP2_DP2_OVERLAP,
    PP2_TP2_DP2,
    MOE_DP2,
    Layout("moe-dp3", 3, extra=(*EXPERTS, *DP3.extra)),
    MOE_EP2,
    MOE_EP2_DP2,
    # Six ranks share the dense part; groups of three share experts.
    Layout("moe-dp6-ep2", 6, replica="mirror", extra=(*MOE_EP2.extra, "--global-batch-size", "12")),
    replace(MOE_TP2_EP2, name="moe-tp2-dp2-ep2", replica="auto"),
    MOE_CUT,
    Layout("moe-pp2-dp4-ep2", 8, pp=2, extra=MOE_EP2.extra),
)
# These layouts are also trained in fp16 and fp32 where the framework can, and with the format torch_dist.
VARIED = (DP2, DP3, DP2_WHOLE, TP2_DP2, PP2_DP2, MOE_EP2)
# In these layouts each rank holds state without a second copy: an exception can be survived, a death cannot.
ALONE = frozenset({"dp1", TP2_DP1.name, "pp2-dp1", MOE_EP2_DP2.name, MOE_CUT.name})
# Trained with Megatron-core as a library: on a CPU Megatron-LM itself has no attention for context
# parallelism.
CONTEXT = Layout("cp2-dp2", 4)


@dataclass(frozen=True)
class Impossible:
    """A combination that the unmodified framework cannot run on a CPU.

    Attributes:
        says: the error in the log of the job.
        because: the reason, and the combination trained instead.
        arguments: of the script, besides the layout's.
    """

    layout: Layout
    says: str
    because: str
    arguments: tuple[str, ...] = ()


IMPOSSIBLE = (
    Impossible(
        Layout("cp2-dp2", 4, extra=("--context-parallel-size", "2")),
        "Context parallelism is only supported by TEDotProductAttention",
        "Megatron-LM's attention for context parallelism is Transformer Engine's, which needs CUDA; trained "
        "with Megatron-core as a library and a plain attention instead (cp2-dp2 above)",
    ),
    Impossible(
        replace(MOE_CUT, name="moe-tp2-dp2-ep2-cut, alltoall", extra=(*MOE_CUT.extra, *_ALLTOALL)),
        "ProcessGroupGloo::allgather: invalid tensor size",
        "tokens are gathered from ranks that have different numbers of them, which gloo cannot; trained with "
        "the dispatcher `allgather`, and with experts that are not cut by tensor parallelism",
    ),
    Impossible(
        replace(MOE_EP2, name="moe-dp4-ep2", precision="fp16"),
        "Expert parallelism is not supported with fp16 training",
        "the framework refuses expert parallelism with fp16; trained with bf16 and fp32",
    ),
    Impossible(
        DP2,
        "Async checkpoint save not implemented for legacy checkpoints",
        "the framework saves asynchronously in `torch_dist` alone; trained with that",
        ("--async-save",),
    ),
)


def replicas(layout: Layout) -> list[tuple[str, Layout]]:
    """Return the possible replicas of a layout, each with its layout."""
    if not layout.distributed_optimizer or layout.data_parallel_size == 1:
        return [("none", layout)]
    if layout.replica == "mirror" or layout.data_parallel_size % 2:
        return [("mirror", layout)]
    return [("split", layout), ("mirror", replace(layout, name=f"{layout.name}-mirror", replica="mirror"))]
