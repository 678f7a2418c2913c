#!/usr/bin/env bash
# one_node.sh on several nodes: the same command on each of them, but for NODE_RANK. All folders are on a file system that
# every node sees.
#
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=10.0.0.1 GLOO_SOCKET_IFNAME=enp189s0f0 \
#       TTP_TLS_CERT=node0.pem TTP_TLS_KEY=node0.key TTP_TLS_CA=signer.pem \
#       MEGATRON=... DATA=... TOKENIZER=... SAVE=... ./several_nodes.sh [more arguments of pretrain_gpt.py]
set -euo pipefail
: "${NNODES:?how many nodes}" "${NODE_RANK:?which of them this is, from 0 on}"
: "${MASTER_ADDR:?the address of node 0, at which all nodes reach it}"
# torch's own variables for the flags of torchrun; ttprun reads them as torchrun does.
export PET_NNODES=$NNODES PET_NODE_RANK=$NODE_RANK
# On node 0 the rendezvous is, at MASTER_PORT, and the controller listens, at port 8000 (TTP_PORT) or the next free one;
# nodes 1 to 3 stand by for it. Let these ports through between the nodes.
export PET_MASTER_ADDR=$MASTER_ADDR PET_MASTER_PORT=${MASTER_PORT:-29400}
# The network between the nodes: over it the survivors bring their shards together. It is the interface that has the
# node's address in `ip address`.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:?an interface of this node, as enp189s0f0}
# Agents on several machines speak TLS, with the certificates in TTP_TLS_CERT, TTP_TLS_KEY and TTP_TLS_CA
# (docs/several_nodes.md makes them with openssl). TTP_TLS=plain is for a network in which you trust every machine. With
# neither, ttprun refuses to start.
# Seconds that an incident may last, besides a save that makes progress; then the job ends without one.
export TTP_OT=${TTP_OT:-120}

exec "$(dirname "${BASH_SOURCE[0]}")/one_node.sh" "$@"
