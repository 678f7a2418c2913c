#!/usr/bin/env bash
# A GPT on one node with Megatron-LM's own pretrain_gpt.py. Against the same script for torchrun two things are
# different: the launcher, and that --save is there.
#
#   MEGATRON=/path/to/Megatron-LM DATA=/path/to/corpus_text_document TOKENIZER=/path/to/tokenizer.json \
#       SAVE=/path/to/checkpoints ./one_node.sh [more arguments of pretrain_gpt.py]
set -euo pipefail
: "${MEGATRON:?the folder of Megatron-LM}" "${DATA:?the prefix of a .bin and an .idx}"
: "${TOKENIZER:?a tokenizer.json}" "${SAVE:?the folder of the checkpoints}"

launcher=(
    ttprun
    --nproc-per-node "${PROCESSES:-8}"
    # Each failure takes one. After each the job goes on from the step that the survivors saved.
    --max-restarts "${RESTARTS:-100}"
    # Logs, and for each incident a report: what happened when, on which rank.
    --ttp-log-path "$SAVE/ttp-logs"
)
model=(
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16
    --seq-length 1024 --max-position-embeddings 1024
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER"
)
training=(
    --micro-batch-size 4 --global-batch-size 256 --train-iters 100000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01
    --weight-decay 0.1 --clip-grad 1.0 --bf16
    # Cuts the optimizer state in shards. The adaptor sees to it that each has a second holder.
    --use-distributed-optimizer
)
data=(--data-path "$DATA" --split "99,1,0" --log-interval 10 --eval-interval 1000 --eval-iters 10)
saving=(
    # --load is the same folder: there the last words are, too. A restart by ttprun loads from --save whatever
    # --load is, and says so; a new ttprun does not.
    --save "$SAVE" --load "$SAVE"
    # For what no copy survives (a whole cluster without power); it can be as rare as you dare.
    --save-interval 1000
    --ckpt-format torch
)
cd "$MEGATRON"
exec "${launcher[@]}" pretrain_gpt.py "${model[@]}" "${training[@]}" "${data[@]}" "${saving[@]}" "$@"
