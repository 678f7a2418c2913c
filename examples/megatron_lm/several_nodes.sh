#!/usr/bin/env bash
# one_node.sh on several nodes: the same command on each of them, in any order. All folders are on a file system that
# every node sees.
#
#   NNODES=4 MASTER_ADDR=10.0.0.1 GLOO_SOCKET_IFNAME=enp189s0f0 \
#       MEGATRON=... DATA=... TOKENIZER=... SAVE=... ./several_nodes.sh [more arguments of pretrain_gpt.py]
set -euo pipefail
# MASTER_ADDR is the address of one node, the same for all. There is the rendezvous, at MASTER_PORT, and the controller,
# at port 8000 (TTP_PORT) or the next free one; three more nodes stand by for the controller. Let all of these through.
: "${NNODES:?how many nodes}" "${MASTER_ADDR:?the address of one of them}"
# torch's own variables for the flags of torchrun; ttprun reads them as torchrun does.
export PET_NNODES=$NNODES PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=$MASTER_ADDR:${MASTER_PORT:-29400}
export PET_RDZV_ID=${JOB:-gpt}
# The network between the nodes: over it the survivors bring their shards together. It is the interface that has the
# node's address in `ip address`.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:?an interface of the nodes, as enp189s0f0}
# Agents on several machines speak TLS with certificates (TTP_TLS_CERT, TTP_TLS_KEY, TTP_TLS_CA). Without them they are
# told here to speak plain: only if you trust the network between them.
if [[ -z ${TTP_TLS_CERT:-} ]]; then export TTP_TLS=${TTP_TLS:-plain}; fi
# Seconds that an incident may last, besides a save that makes progress; then the job ends without one.
export TTP_OT=${TTP_OT:-120}

exec "$(dirname "${BASH_SOURCE[0]}")/one_node.sh" "$@"
