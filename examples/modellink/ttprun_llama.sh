#!/usr/bin/env bash
# Llama 7B with ModelLink's own pretrain_llama.py (commit af1347, package `ascendspeed`), unedited. It is
# examples/llama/pretrain_llama_7B_zero_8p.sh of that commit with what step 10 of the guide of MindIO TTP changes in it:
#
#   removed  DeepSpeed: its launcher, its configuration file, --deepspeed and the arguments that go with it
#   changed  ttprun starts the processes; GPUS_PER_NODE is NPUS_PER_NODE; addresses and folders come from outside
#   added    --use-distributed-optimizer, --save, --local-copy-os (by choice), and the variables below
#
# Edits 1 to 9 of that guide are not needed: ttprun patches the framework when it is imported.
#
#   MODELLINK=/path/to/ModelLink DATA=/path/to/llama_text_document TOKENIZER=/path/to/llama SAVE=/path/to/checkpoints \
#       ./ttprun_llama.sh [more arguments of pretrain_llama.py]
#
# The same on every node, with NNODES, NODE_RANK, MASTER_ADDR and GLOO_SOCKET_IFNAME. LOAD is the folder of weights to
# begin with, if there are any. Started again, after whatever has ended it, the job goes on from what is in SAVE.
set -euo pipefail
: "${MODELLINK:?the folder of ModelLink}" "${DATA:?the prefix of a .bin and an .idx}"
: "${TOKENIZER:?the folder of a tokenizer}" "${SAVE:?the folder of the checkpoints, seen by every node}"
cd "$MODELLINK"

ASCEND=${ASCEND:-/usr/local/Ascend/ascend-toolkit/set_env.sh}
# shellcheck disable=SC1090
if [[ -f $ASCEND ]]; then set +u; source "$ASCEND"; set -u; fi
export HCCL_CONNECT_TIMEOUT=${HCCL_CONNECT_TIMEOUT:-1200} INF_NAN_MODE_ENABLE=1

if [[ ${NNODES:-1} -gt 1 ]]; then
    : "${NODE_RANK:?which node this is, from 0 on}" "${MASTER_ADDR:?the address of node 0, at which all nodes reach it}"
    # The network between the nodes: over it the survivors bring their shards together. It is the interface that has the
    # node's address in `ip address`.
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:?an interface of this node, as enp189s0f0}
fi
# The address of node 0. There the rendezvous is, at MASTER_PORT, and the controller listens, at port 8000 (TTP_PORT) or
# the next free one; nodes 1 to 3 stand by for it. Let these ports through between the nodes.
export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-6000}
# Agents on several machines speak TLS, with the certificates in TTP_TLS_CERT, TTP_TLS_KEY and TTP_TLS_CA
# (docs/several_nodes.md makes them with openssl). TTP_TLS=plain is for a network in which you trust every machine. With
# neither, ttprun refuses to start on several nodes.
# Seconds that an incident may last, besides a save that makes progress; then the job ends without one.
export TTP_OT=${TTP_OT:-360}
# False: plain torchrun and the plain framework, as with `torchrun` in the place of `ttprun`.
export ENABLE_TTP=${ENABLE_TTP:-True}

launcher=(
    ttprun
    # An odd number of data-parallel ranks is as good as an even one: their shards are mirrored then (TTP_REPLICA). The
    # global batch size has to be a multiple of it, times the micro-batch size.
    --nproc_per_node "${NPUS_PER_NODE:-8}"
    --nnodes "${NNODES:-1}" --node_rank "${NODE_RANK:-0}"
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT"
    # Each failure takes one. After each the job goes on from the step that the survivors saved.
    --max_restarts "${RESTARTS:-100}"
    --ttp-log-path "$SAVE/ttp-logs"
)
model=(
    --DDP-impl local --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
    --seq-length 2048 --max-position-embeddings 2048 --position-embedding-type rope --normalization RMSNorm
    --tokenizer-name-or-path "$TOKENIZER" --tokenizer-not-use-fast --init-method-std 0.01
    --no-bias-gelu-fusion
)
# Only on servers with Atlas 800T A2.
if [[ -n ${ATLAS_800T_A2:-} ]]; then model+=(--use-flash-attn --use-fused-rmsnorm); fi
training=(
    --micro-batch-size 2 --global-batch-size "${GLOBAL_BATCH:-64}" --train-iters 5000
    --lr 1.0e-6 --min-lr 1.0e-6 --lr-decay-style cosine --lr-warmup-fraction .01 --weight-decay 1e-2
    --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --fp16
    --distributed-backend nccl
    # Cuts the optimizer state in shards. The adaptor sees to it that each has a second holder.
    --use-distributed-optimizer
)
# A copy of the optimizer state before each update, in place of a barrier of all ranks: for large clusters; it takes
# memory. It is an argument of the adaptor's, which the plain framework does not know.
if [[ -n ${LOCAL_COPY:-} && ${ENABLE_TTP,,} =~ ^(true|1)$ ]]; then training+=(--local-copy-os); fi
data=(--data-path "$DATA" --split "900,50,50" --log-interval 1)
saving=(
    --save "$SAVE"
    # For what no copy survives (a whole cluster without power); it can be as rare as you dare.
    --save-interval 10000
)
if [[ -f $SAVE/latest_checkpointed_iteration.txt ]]; then
    saving+=(--load "$SAVE") # optimizer and random states included, as after a failure
elif [[ -n ${LOAD:-} ]]; then
    saving+=(--load "$LOAD" --no-load-optim --no-load-rng)
fi
exec "${launcher[@]}" pretrain_llama.py "${model[@]}" "${training[@]}" "${data[@]}" "${saving[@]}" "$@"
