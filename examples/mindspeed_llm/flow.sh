#!/usr/bin/env bash
# A model's whole life with MindSpeed-LLM, step by step, trained under ttprun: see README.md beside it.
#
#   MINDSPEED_LLM=/path/to/MindSpeed-LLM ./flow.sh --tiny        a Qwen3 of 2 layers, on a CPU
#   MINDSPEED_LLM=... MODEL=... CORPUS=... ALPACA=... MMLU=... ./flow.sh      a real one, on Ascend
#
# A step that is done is not done again; a training that was interrupted goes on from its newest checkpoint.
# --from STEP does STEP and all after it again.
set -euo pipefail

steps=(check convert preprocess pretrain tune lora generate chat evaluate back verify)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
usage="usage: flow.sh [--tiny] [--from STEP], STEP one of: ${steps[*]}"
fail() { echo "flow.sh: error: $*" >&2; exit 2; }

tiny='' from=''
while (($#)); do
    case $1 in
        --tiny) tiny=yes ;;
        --from) from=${2:-}; shift ;;
        -h | --help) echo "$usage"; exit ;;
        *) fail "$1: $usage" ;;
    esac
    shift || fail "--from says no step: $usage"
done
[[ -z $from || " ${steps[*]} " == *" $from "* ]] || fail "--from $from: $usage"

: "${MINDSPEED_LLM:=}"
[[ -f $MINDSPEED_LLM/pretrain_gpt.py && -d $MINDSPEED_LLM/megatron ]] ||
    fail "MINDSPEED_LLM is '$MINDSPEED_LLM', not a folder of MindSpeed-LLM with Megatron-LM's megatron in it: git clone https://gitcode.com/Ascend/MindSpeed-LLM, and its installation guide"
MINDSPEED_LLM=$(cd "$MINDSPEED_LLM" && pwd)
OUT=${OUT:-$PWD/flow-out}
mkdir -p "$OUT/done" "$OUT/logs"
OUT=$(cd "$OUT" && pwd)
# Held by this shell and by what it starts, so it also refuses while a training outlives a flow.sh that was killed.
exec 9> "$OUT/.lock"
flock -n 9 || fail "OUT is '$OUT': another flow.sh, or a training that one has started, is running there"

if [[ $tiny ]]; then
    MODEL=$OUT/given/model CORPUS=$OUT/given/corpus.json ALPACA=$OUT/given/alpaca.parquet MMLU=$OUT/given/mmlu
    : "${DEVICE:=cpu}" "${PROCESSES:=2}" "${SEQ_LENGTH:=64}" "${BATCH:=4}" "${ITERS:=12}" "${TUNE_ITERS:=10}"
    : "${LR:=1e-3}" "${LORA_R:=4}" "${LORA_ALPHA:=8}" "${NEW_TOKENS:=8}" "${GENERATE_LENGTH:=1024}" "${KILL=pretrain tune}" "${VERIFY=yes}"
else
    : "${MODEL:?flow.sh: a folder with a Qwen3 of Hugging Face}" "${CORPUS:?flow.sh: texts, .json or .parquet}"
    : "${ALPACA:?flow.sh: instructions, .json, .jsonl or .parquet}" "${MMLU:?flow.sh: a folder with test/ and dev/}"
fi
DEVICE=${DEVICE:-npu}           # cpu: with stand-ins for what only an Ascend machine has
PROCESSES=${PROCESSES:-8}       # of this node; further nodes as with torchrun, in LAUNCHER_ARGS
LAUNCHER_ARGS=${LAUNCHER_ARGS:-}
TP=${TP:-1} PP=${PP:-1}         # tensor and pipeline parallel size
SEQ_LENGTH=${SEQ_LENGTH:-4096} BATCH=${BATCH:-32} ITERS=${ITERS:-2000} TUNE_ITERS=${TUNE_ITERS:-2000}
SAVE_INTERVAL=${SAVE_INTERVAL:-1000} RESTARTS=${RESTARTS:-100}
LR=${LR:-1.25e-6}
LORA_R=${LORA_R:-16} LORA_ALPHA=${LORA_ALPHA:-32}
read -ra targets <<< "${LORA_TARGETS:-linear_qkv linear_proj linear_fc1 linear_fc2}"
PROMPT_TYPE=${PROMPT_TYPE:-qwen3}
NEW_TOKENS=${NEW_TOKENS:-256} GENERATE_LENGTH=${GENERATE_LENGTH:-$SEQ_LENGTH}  # prompt and answer
DROP_EMPTY=${DROP_EMPTY:-}      # anything: leave out instructions without an answer
KILL=${KILL:-}                  # steps in which rank 1 is killed once, to see what happens: "pretrain tune"
KILL_AFTER=${KILL_AFTER:-4}     # after this training step
VERIFY=${VERIFY:-}              # anything: train undisturbed, too, and compare; needs transformers and peft

export CUDA_DEVICE_MAX_CONNECTIONS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
path=$MINDSPEED_LLM
device=() launcher_device=()
if [[ $DEVICE == cpu ]]; then
    path=$here/../../tests/standins:$path
    device=(-m adaptor.devices cpu) launcher_device=(--ttp-device cpu)
    backend=(--distributed-backend gloo --no-bias-swiglu-fusion --no-rope-fusion)
    export OMP_NUM_THREADS=1 PYTORCH_JIT=0 TORCHDYNAMO_DISABLE=1 TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1
    [[ $TP == 1 && $PP == 1 ]] || fail "TP is $TP, PP is $PP: on a CPU this flow has 1 and 1"
else
    [[ $DEVICE == npu ]] || fail "DEVICE is $DEVICE: say npu or cpu"
    backend=(--use-flash-attn --use-fused-rotary-pos-emb --use-fused-swiglu --use-fused-rmsnorm)
fi
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH}
templates=$MINDSPEED_LLM/mindspeed_llm/tasks/evaluation/eval_impl/fewshot_template/mmlu_5shot_template.json

# --- A signal is passed on to the step, and waited for: a training saves its newest finished step first.
running=''
stopped() {
    trap '' INT TERM HUP
    if [[ $running ]]; then
        echo "flow.sh: SIG$1: $step is told to end" >&2
        kill -TERM -- "-$running" 2> /dev/null || true
        while kill -0 -- "-$running" 2> /dev/null; do sleep 0.2; done
    fi
    exit $((128 + $2))
}
trap 'stopped INT 2' INT
trap 'stopped TERM 15' TERM
trap 'stopped HUP 1' HUP

# --- One step: its commands' output goes to a log, a line says how long it took.
log() { echo "$OUT/logs/$step.log"; }
quiet() {
    local code=0
    "$@" >> "$(log)" 2>&1 || code=$?
    ((code == 0)) || { tail -n 25 "$(log)" >&2; fail "$step: exit code $code; all of it: $(log)"; }
}
say() {  # a check: its line is for people
    local line
    line=$("$@" 2>&1) || { echo "$line" >> "$(log)"; fail "$step: ${line##*$'\n'}"; }
    echo "$line" | tee -a "$(log)" | sed "s/^/  /"
}
do_step() {
    step=$1
    # What is given may have changed since: it is checked each time.
    [[ $step == check || ! -e $OUT/done/$step ]] || { echo "$step: done before"; return; }
    local began=$SECONDS
    echo "$step ..."
    : > "$(log)"
    # In the background and in a process group of its own: a shell that waits for a foreground command handles no signal.
    set -m
    "$step" &
    running=$!
    set +m
    wait "$running" || exit $?
    running=''
    touch "$OUT/done/$step"
    echo "$step: $((SECONDS - began)) s"
}
program() { (cd "$MINDSPEED_LLM" && quiet python -W ignore "${device[@]}" "$@"); }

# --- Trainings
# train NAME SCRIPT BASE ARGUMENTS...: begins from BASE, goes on from what NAME has saved.
train() {
    local name=$1 script=$2 base=$3 kill=() load
    shift 3
    load=(--load "$base" --finetune)
    if [[ -f $OUT/$name/latest_checkpointed_iteration.txt ]]; then
        load=(--load "$OUT/$name")
    elif [[ " $KILL " == *" $name "* ]]; then
        kill=(python "$here/fault.py" --rank 1 --after "$KILL_AFTER" --)
    fi
    # shellcheck disable=SC2086
    (cd "$MINDSPEED_LLM" && quiet "${kill[@]}" ttprun --nproc-per-node "$PROCESSES" $LAUNCHER_ARGS \
        --max-restarts "$RESTARTS" --ttp-log-path "$OUT/logs/ttp-$name" "${launcher_device[@]}" \
        "$script" "${model[@]}" "${training[@]}" "${load[@]}" --save "$OUT/$name" "$@")
    grep -ahE "^fault.py: killed|is saved, no finished step is lost" "$(log)" | sed "s/^/  /" || true
}
generation() {  # SCRIPT ARGUMENTS...
    local script=$1
    shift
    (cd "$MINDSPEED_LLM" && quiet torchrun --nproc-per-node "$((TP * PP))" --master-port "${PORT:-29617}" \
        "${device[@]}" "$script" "${model[@]}" --micro-batch-size 1 --seq-length "$GENERATE_LENGTH" \
        --max-new-tokens "$NEW_TOKENS" "$@")
}
arguments() {
    local words
    words=$(python "$here/model_arguments.py" "$MODEL") || exit 2
    read -ra model <<< "$words"
    model+=(
        --tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" --seq-length "$SEQ_LENGTH"
        --tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$MODEL"
        --attention-softmax-in-fp32 --no-masked-softmax-fusion --no-gradient-accumulation-fusion
        --transformer-impl local --ckpt-format torch --seed 42 --exit-on-missing-checkpoint "${backend[@]}"
    )
    [[ ${precision:-bf16} == fp32 ]] || model+=(--bf16)
    training=(
        --use-distributed-optimizer --micro-batch-size 1 --global-batch-size "$BATCH" --num-workers 0
        --lr "$LR" --min-lr 1e-7 --lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0
        --split 100,0,0 --log-interval 1 --save-interval "$SAVE_INTERVAL" --eval-interval 1000000 --eval-iters 0
    )
}

# --- The steps
check() {
    [[ ! $tiny || -d $OUT/given/mmlu ]] || quiet python "$here/tiny.py" "$OUT/given"
    say python "$here/check_weights.py" "$MODEL"
    say python "$here/model_arguments.py" "$MODEL" > /dev/null
    say python "$here/alpaca.py" "$ALPACA" ${DROP_EMPTY:+--drop-empty} --to "$OUT/alpaca.json"
    say python "$here/mmlu.py" check "$MMLU" --template "$templates" --dev
    [[ -e $CORPUS ]] || fail "CORPUS is $CORPUS, which is missing"
    local base=()
    [[ -e $OUT/done/lora || ! -e $OUT/lora-base.json ]] || base=(--base "$OUT/tune" --note "$OUT/lora-base.json")
    say python "$here/lora.py" --rank "$LORA_R" --targets "${targets[@]}" --adapter "$OUT/lora" "${base[@]}"
}
convert() {
    program convert_ckpt_v2.py --load-model-type hf --save-model-type mg --model-type-hf qwen3 \
        --target-tensor-parallel-size "$TP" --target-pipeline-parallel-size "$PP" \
        --load-dir "$MODEL" --save-dir "$OUT/converted"
}
preprocess() {
    mkdir -p "$OUT/data"
    local tokenizer=(--tokenizer-type PretrainedFromHF --tokenizer-name-or-path "$MODEL" --workers 1)
    program preprocess_data.py --input "$CORPUS" --handler-name GeneralPretrainHandler --json-keys text \
        --append-eod --output-prefix "$OUT/data/corpus" "${tokenizer[@]}"
    program preprocess_data.py --input "$OUT/alpaca.json" --handler-name AlpacaStyleInstructionHandler \
        --prompt-type "$PROMPT_TYPE" --seq-length "$SEQ_LENGTH" --output-prefix "$OUT/data/alpaca" "${tokenizer[@]}"
}
instructions=(--stage sft --is-instruction-dataset --prompt-type "$PROMPT_TYPE" --no-pad-to-seq-lengths)
pretrain() {
    train "${1:-pretrain}" pretrain_gpt.py "$OUT/converted" --train-iters "$ITERS" --data-path "$OUT/data/corpus_text_document"
}
tune() {
    train "${1:-tune}" posttrain_gpt.py "$OUT/pretrain" "${instructions[@]}" --train-iters "$TUNE_ITERS" \
        --data-path "$OUT/data/alpaca"
}
lora() {
    say python "$here/lora.py" --rank "$LORA_R" --targets "${targets[@]}" --adapter "$OUT/lora" \
        --base "$OUT/tune" --note "$OUT/lora-base.json"
    train lora posttrain_gpt.py "$OUT/tune" "${instructions[@]}" --train-iters "$TUNE_ITERS" \
        --data-path "$OUT/data/alpaca" \
        --lora-r "$LORA_R" --lora-alpha "$LORA_ALPHA" --lora-target-modules "${targets[@]}"
}
generate() {
    generation inference.py --load "$OUT/tune" --task greedy
    say grep -aA1 "^MindSpeed-LLM:" "$(log)"
}
chat() {  # each answer appears token by token
    # No pipe: printf would fail if the other end came to its end before it.
    generation inference.py --load "$OUT/tune" --task chat --prompt-type "$PROMPT_TYPE" <<<"${PROMPT:-alpha beta}"$'\nq'
    say grep -aA1 "^MindSpeed-LLM:" "$(log)"
}
evaluate() {
    generation evaluation.py --load "$OUT/tune" --task mmlu --task-data-path "$MMLU/test" \
        --prompt-type "$PROMPT_TYPE" --max-new-tokens 2
    say python "$here/mmlu.py" score "$(log)" "$MMLU"
}
to_hugging_face() {  # FROM TO MORE...
    local from=$1 to=$2
    shift 2
    program "$here/convert_back.py" --load-model-type mg --save-model-type hf --model-type-hf qwen3 \
        --load-dir "$OUT/$from" --save-dir "$OUT/$to" --hf-cfg-dir "$MODEL" "$@"
    say python "$here/check_weights.py" "$OUT/$to"
}
back() {
    to_hugging_face tune hf-tuned
    to_hugging_face lora hf-lora --lora-r "$LORA_R" --lora-alpha "$LORA_ALPHA" --lora-target-modules "${targets[@]}"
}
verify() {
    [[ $VERIFY ]] || { echo "  nothing: VERIFY is empty"; return; }
    KILL=''
    pretrain undisturbed-pretrain
    tune undisturbed-tune
    say python -W ignore "$here/verify.py" checkpoints "$OUT/pretrain" "$OUT/undisturbed-pretrain"
    say python -W ignore "$here/verify.py" checkpoints "$OUT/tune" "$OUT/undisturbed-tune"
    to_hugging_face converted hf-again
    say python -W ignore "$here/verify.py" models "$MODEL" "$OUT/hf-again"
    local name
    for name in converted tune; do
        precision=fp32 arguments
        LOGITS=$OUT/$name-logits.pt generation "$here/logits.py" --load "$OUT/$name"
    done
    say python -W ignore "$here/verify.py" logits "$MODEL" "$OUT/converted-logits.pt"
    say python -W ignore "$here/verify.py" logits "$OUT/hf-tuned" "$OUT/tune-logits.pt"
    say python -W ignore "$here/verify.py" merged "$OUT/hf-tuned" "$OUT/lora" "$OUT/hf-lora"
}

if [[ $from ]]; then
    again=''
    for step in "${steps[@]}"; do
        [[ $step != "$from" ]] || again=yes
        [[ ! $again ]] || rm -rf "$OUT/done/$step" "${OUT:?}/$step" "$OUT/undisturbed-$step" "$OUT/$step-base.json"
    done
fi
model=() training=()
for step in "${steps[@]}"; do
    [[ $step == check ]] || ((${#model[@]})) || arguments
    do_step "$step"
done
echo "flow.sh: done: $OUT/hf-tuned and, with LoRA merged, $OUT/hf-lora"
