"""The checks of `by_hand` for a checkout with MindSpeed: MindSpeed-LLM, or ModelLink 1.2."""

from __future__ import annotations

from dataclasses import replace

from tests.faults.harness import (
    DP2,
    DP2_FP16,
    DP3,
    DP4,
    MOE_DP2,
    MOE_EP2,
    PP2_DP2,
    PP2_TP2_DP2,
    TP2_DP1,
    TP2_DP2,
    Layout,
)
from tests.frameworks.checks import (
    CHECKS,
    RECOVERED,
    REFUSED,
    SAID,
    SAVED,
    STAGES,
    Check,
    copies,
    has_local_copy,
    is_not_online,
    recovers,
    refused,
    restarts,
    saves,
    survives,
)


def refuses(*arguments: str) -> Check:
    line = f"{arguments[0]} is "
    return Check(DP2, f"none, but `{arguments[0]}`", refused(line), REFUSED, arguments=arguments)


def dies(layout: Layout, rank: int, phase: str, saved: int, nodes: int = 1) -> Check:
    text_of_phase = {
        "norm": "before the gradient norm of",
        "door-after": "at the door of",
        "update": "in the update of",
    }
    return Check(
        layout,
        f"SIGKILL of rank {rank}, {text_of_phase[phase]} step 6",
        survives(saved),
        SAVED.format(saved),
        f"rank={rank},step=6,phase={phase},kind=sigkill",
        nodes=nodes,
    )


def _breaks_off(layout: Layout) -> Check:
    """Return a check that undoes an interrupted update by the local copy: the other holder is gone."""
    return Check(
        layout,
        "exception of rank 0 in the update of step 6, SIGKILL of rank 1",
        has_local_copy(5),
        SAVED.format(5),
        "rank=0,step=6,phase=update,kind=exception,also=1",
        arguments=("--local-copy-os",),
    )


# MindSpeed replaces the layers and the operators of the update, at which the faults above strike.
MINDSPEED = {
    "undisturbed": CHECKS["undisturbed"],
    "norm": Check(
        DP2,
        "SIGKILL of rank 1, before the gradient norm of step 6",
        survives(5),
        SAVED.format(5),
        "rank=1,step=6,phase=norm,kind=sigkill",
    ),
    "exception": Check(
        DP2,
        "exception in rank 1, before the gradient norm of step 6",
        survives(5, code=1),
        SAVED.format(5),
        "rank=1,step=6,phase=norm,kind=exception",
    ),
    "door": Check(
        DP2,
        "SIGKILL of rank 1, at the door of step 6",
        survives(6),
        SAVED.format(6),
        "rank=1,step=6,phase=door-after,kind=sigkill",
    ),
    "restart": Check(
        DP2,
        "SIGKILL of rank 0, before the gradient norm of step 4",
        restarts(3),
        CHECKS["restart"].outcome,
        "rank=0,step=4,phase=norm,kind=sigkill",
        restarts=1,
    ),
    "availability": Check(
        DP2,
        "none, but `--enable-high-availability`",
        refused("--enable-high-availability is given"),
        REFUSED,
        arguments=("--enable-high-availability",),
    ),
    "no-shards": Check(
        replace(DP2, name="dp2-whole-optimizer", distributed_optimizer=False),
        "none, but `--local-copy-os`",
        refused("--local-copy-os is given without --use-distributed-optimizer"),
        REFUSED,
        arguments=("--local-copy-os",),
    ),
    "odd-split": Check(replace(DP3, replica="split"), "none", refused("TTP_REPLICA is split, but "), REFUSED),
}
NODES_RESTART = replace(
    MINDSPEED["restart"],
    layout=DP4,
    fault="SIGKILL of rank 2, before the gradient norm of step 4",
    spec="rank=2,step=4,phase=norm,kind=sigkill",
    nodes=2,
)
CP2_DP2 = Layout("cp2-dp2", 4, extra=("--use-mcore-models", "--context-parallel-size", "2"))
# Its own model is another than that of Megatron-core.
MODELLINK = {
    "lora": refuses("--lora-target-modules", "dense"),
    "tensor": CHECKS["tensor"],
    "pipeline": dies(PP2_DP2, 2, "norm", 5),
    "pipeline-door": dies(PP2_DP2, 1, "door-after", 6),
    "context": dies(CP2_DP2, 1, "norm", 5),
    "context-door": dies(CP2_DP2, 2, "door-after", 6),
    "all": dies(PP2_TP2_DP2, 5, "norm", 5),
    "all-door": dies(PP2_TP2_DP2, 2, "door-after", 6),
    "local-copy": _breaks_off(DP2),
    "local-copy-odd": _breaks_off(DP3),
    "odd": dies(DP3, 1, "norm", 5),
    "odd-door": dies(DP3, 2, "door-after", 6),
    "nodes": dies(DP4, 2, "norm", 5, nodes=2),
    "nodes-restart": NODES_RESTART,
    "mcore": replace(
        MINDSPEED["norm"], layout=replace(DP2, name="dp2-core-models", extra=("--use-mcore-models",))
    ),
}
NOT_ONLINE = {
    "online": Check(
        DP2,
        "SIGKILL of rank 0, before the gradient norm of step 4; TTP_ONLINE=60",
        is_not_online(3),
        SAID + CHECKS["restart"].outcome,
        "rank=0,step=4,phase=norm,kind=sigkill",
        restarts=1,
    ),
}
# Where embeddings are tied, Megatron-core 0.12 asserts in its stages if sizes are no multiple of 128.
_ROPE = ("--position-embedding-type", "rope", "--use-mcore-models")


def _context(name: str, algorithm: str, **layout_options: int) -> Layout:
    extra = ("--context-parallel-size", "2", "--context-parallel-algo", algorithm, *_ROPE)
    return Layout(name, extra=extra, **layout_options)


NO_GLOO = Layout("dp2-no-gloo-group", 2, extra=("--disable-gloo-group",))
OVERLAPS = Layout("dp2-overlap", 2, extra=("--overlap-grad-reduce", "--overlap-param-gather"))
# Where the memory of the optimizer state is not that of torch.
REUSE = Layout("dp2-reuse", 2, extra=("--reuse-fp32-param",))
REUSE_DP3 = replace(DP3, name="dp3-reuse", extra=(*DP3.extra, "--reuse-fp32-param"))
REUSE_EXPERTS = Layout("moe-dp4-ep2-reuse", 4, extra=(*MOE_EP2.extra, "--reuse-fp32-param"))
# The experts of a rank are nowhere else: their shard is the whole of them.
REUSE_LONE = replace(REUSE_EXPERTS, name="moe-dp2-ep2-reuse", processes=2)
SWAP = Layout("dp2-swap", 2, extra=("--swap-optimizer",))
# Moments in bf16, beside main params whose halves are apart.
O2 = Layout("dp2-o2-reuse", 2, extra=("--o2-optimizer", "--o2-gradient", "--reuse-fp32-param"))
SWAP_EXPERTS = Layout("moe-dp4-ep2-swap", 4, extra=(*MOE_EP2.extra, "--swap-optimizer"))
ULYSSES = _context("cp2-dp2", "ulysses_cp_algo", processes=4)
RING = _context("cp2-dp2-ring", "megatron_cp_algo", processes=4)
RING_TP2 = _context("cp2-tp2-dp2-ring", "megatron_cp_algo", processes=8, tp=2)
LLM = {
    "copies": Check(
        TP2_DP1,
        "SIGKILL of rank 1, before the gradient norm of step 8; TTP_HOST_COPY=2",
        copies(6),
        "started again from copies of step 6, as the framework saves it; trained to the end, bitwise",
        "rank=1,step=8,phase=norm,kind=sigkill",
        restarts=1,
    ),
    "lora-filter": refuses("--lora-ckpt-filter"),
    "nodes": dies(DP4, 2, "norm", 5, nodes=2),
    "nodes-update": dies(DP4, 1, "update", 6, nodes=2),
    "nodes-loss": Check(
        DP4,
        "SIGKILL of node 1's ttprun, before the gradient norm of step 6",
        survives(5),
        SAVED.format(5),
        "rank=2,step=6,phase=norm,kind=agent-sigkill",
        nodes=2,
    ),
    "nodes-restart": NODES_RESTART,
    "local-copy": _breaks_off(DP2),
    "local-copy-odd": _breaks_off(DP3),
    "local-copy-norm": replace(dies(DP2, 1, "norm", 5), arguments=("--local-copy-os",)),
    "overlap": dies(OVERLAPS, 1, "norm", 5),
    "overlap-update": dies(OVERLAPS, 0, "update", 6),
    "fp16": dies(DP2_FP16, 1, "norm", 5),
    "reuse": dies(REUSE, 1, "norm", 5),
    "reuse-update": dies(REUSE, 0, "update", 6),
    "reuse-restart": replace(MINDSPEED["restart"], layout=REUSE),
    "reuse-odd": dies(REUSE_DP3, 1, "norm", 5),
    "reuse-copies": Check(
        replace(REUSE, replica="none"),
        "SIGKILL of rank 1, before the gradient norm of step 8; TTP_HOST_COPY=2",
        copies(6),
        "started again from copies of step 6, as the framework saves it; trained to the end, bitwise",
        "rank=1,step=8,phase=norm,kind=sigkill",
        restarts=1,
    ),
    "reuse-experts": dies(REUSE_EXPERTS, 1, "norm", 5),
    "reuse-lone": Check(
        REUSE_LONE,
        "exception in rank 1, before the gradient norm of step 6",
        survives(5, code=1),
        SAVED.format(5),
        "rank=1,step=6,phase=norm,kind=exception",
    ),
    "swap": dies(SWAP, 1, "norm", 5),
    "swap-update": dies(SWAP, 0, "update", 6),
    "swap-restart": replace(MINDSPEED["restart"], layout=SWAP),
    "swap-experts": dies(SWAP_EXPERTS, 1, "norm", 5),
    # Plain torchrun goes on with moments in float32, also from what the framework has saved.
    "o2": replace(dies(O2, 1, "norm", 5), run=saves(5), outcome="step 5 saved as the framework saves it"),
    "o2-restart": replace(MINDSPEED["restart"], layout=O2),
    "averages": refuses("--optimizer-selection", "fused_ema_adamw"),
    # On a CPU the framework cannot load with this option, not even what it has saved.
    "no-gloo": replace(
        dies(NO_GLOO, 1, "norm", 5), run=saves(5), outcome="step 5 saved as the framework saves it"
    ),
    "odd": dies(DP3, 1, "norm", 5),
    "odd-update": dies(DP3, 2, "update", 6),
    "context": dies(ULYSSES, 1, "norm", 5),
    "context-update": dies(ULYSSES, 2, "update", 6),
    "context-restart": replace(MINDSPEED["restart"], layout=ULYSSES),
    "ring": dies(RING, 1, "norm", 5),
    "ring-update": dies(RING, 2, "update", 6),
    "ring-tensor": dies(RING_TP2, 5, "update", 6),
    "update": dies(DP2, 1, "update", 6),
    "tensor": dies(TP2_DP2, 2, "norm", 5),
    "tensor-update": dies(TP2_DP2, 3, "update", 6),
    "tensor-restart": replace(MINDSPEED["restart"], layout=TP2_DP2),
    "pipeline": dies(STAGES, 2, "norm", 5),
    "pipeline-update": dies(STAGES, 1, "update", 6),
}
# Of the versions whose Megatron-core is one with which that was tested.
LLM_ONLINE = {
    f"online-{name}": Check(layout, f"{fault} of step 6", recovers, RECOVERED, spec, restarts=1)
    for name, layout, fault, spec in (
        (
            "norm",
            DP2,
            "SIGKILL of rank 0, before the gradient norm",
            "rank=0,step=6,phase=norm,kind=sigkill",
        ),
        ("update", DP2, "SIGKILL of rank 1, in the update", "rank=1,step=6,phase=update,kind=sigkill"),
        (
            "exception",
            DP2,
            "an exception of rank 1, before the gradient norm",
            "rank=1,step=6,phase=norm,kind=exception",
        ),
        (
            "hang",
            DP2,
            "a hang of rank 1, before the gradient norm",
            "rank=1,step=6,phase=norm,kind=deadlock",
        ),
        (
            "tensor",
            TP2_DP2,
            "SIGKILL of rank 3, before the gradient norm",
            "rank=3,step=6,phase=norm,kind=sigkill",
        ),
        ("pipeline", STAGES, "SIGKILL of rank 1, in the update", "rank=1,step=6,phase=update,kind=sigkill"),
        (
            "reuse",
            REUSE,
            "SIGKILL of rank 0, before the gradient norm",
            "rank=0,step=6,phase=norm,kind=sigkill",
        ),
        (
            "reuse-update",
            REUSE,
            "SIGKILL of rank 1, in the update",
            "rank=1,step=6,phase=update,kind=sigkill",
        ),
        (
            "swap",
            SWAP,
            "SIGKILL of rank 0, before the gradient norm",
            "rank=0,step=6,phase=norm,kind=sigkill",
        ),
        ("o2", O2, "SIGKILL of rank 1, in the update", "rank=1,step=6,phase=update,kind=sigkill"),
        (
            "experts",
            MOE_EP2,
            "SIGKILL of rank 2, before the gradient norm",
            "rank=2,step=6,phase=norm,kind=sigkill",
        ),
    )
}
# Experts are cut by tensor parallelism like the rest; or they are whole on each rank.
MOE_TP2 = Layout("moe-tp2-dp2", 4, tp=2, extra=(*MOE_DP2.extra, "--sequence-parallel"))
MOE_TP2_DP4 = Layout("moe-tp2-dp4-ep2", 8, tp=2, extra=(*MOE_EP2.extra, "--sequence-parallel"))
MOE_ALLTOALL = Layout(
    "moe-dp4-ep2-alltoall", 4, extra=(*MOE_EP2.extra, "--moe-token-dispatcher-type", "alltoall")
)
MOE_WHOLE = Layout(
    "moe-tp2-dp2-ep2",
    4,
    tp=2,
    extra=(*MOE_EP2.extra, "--expert-tensor-parallel-size", "1", "--sequence-parallel"),
)
EXPERTS = {
    "experts-tensor": dies(MOE_TP2, 1, "norm", 5),
    "experts-tensor-update": dies(MOE_TP2, 2, "update", 6),
    "experts-tensor-all": dies(MOE_TP2_DP4, 5, "norm", 5),
    "experts-tensor-all-update": dies(MOE_TP2_DP4, 2, "update", 6),
    "experts-alltoall": dies(MOE_ALLTOALL, 2, "update", 6),
    "experts-whole": dies(MOE_WHOLE, 1, "norm", 5),
    "experts-whole-update": dies(MOE_WHOLE, 2, "update", 6),
    "experts": dies(MOE_DP2, 1, "norm", 5),
    "experts-update": dies(MOE_DP2, 0, "update", 6),
    "experts-parallel": dies(MOE_EP2, 1, "norm", 5),
    "experts-parallel-update": dies(MOE_EP2, 2, "update", 6),
}
