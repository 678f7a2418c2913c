#!/usr/bin/env bash
# The whole story on a CPU, from local text to a model for Hugging Face, with a process killed on the way:
#
#   MEGATRON=DIR bash run.sh [FOLDER]
#
# MEGATRON is what to put on PYTHONPATH for megatron.core, where it is not installed. It takes about 80 s on 2 cores.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=${1:-out/gpt2}
python=${PYTHON:-python}
steps=${STEPS:-40}
kill_at=${KILL_AT:-17}
export PYTHONPATH=${MEGATRON:+$MEGATRON:}${PYTHONPATH:-} PYTHONWARNINGS=ignore OMP_NUM_THREADS=1
unset PYTHONUNBUFFERED  # with it a line of another process may come into one that is printed
[[ ! -e $work ]] || { echo "run.sh: $work is there already: remove it, or name another folder" >&2; exit 2; }
mkdir -p "$work"
work=$(cd "$work" && pwd)

say() { printf '\n== %s\n' "$1"; }

say "1. text, tokenizer, blocks"
$python "$here/data.py" corpus --out "$work/text" --limit 600000
$python "$here/tokenizer.py" "$work/text/train.txt" --vocabulary 1000 --out "$work/tokenizer"
for part in train valid; do
    $python "$here/data.py" encode "$work/text/$part.txt" --tokenizer "$work/tokenizer" --out "$work/data/$part"
done

# $1: folder of checkpoints
train() {
    ttprun --ttp-device cpu --ttp-log-path "$work/logs" --nproc-per-node 2 --max-restarts 1 "$here/train.py" \
        --config tiny --data "$work/data/train" --valid "$work/data/valid" --tokenizer "$work/tokenizer" \
        --stop-at "$steps" --save "$1"
}

say "2. train, undisturbed"
train "$work/undisturbed" | tee "$work/undisturbed.log"

say "3. train, and kill a process in step $kill_at: a new one takes its place, and the other goes on"
train "$work/killed" >"$work/killed.log" 2>&1 &
job=$!
trap 'kill "$job" 2>/dev/null || true' EXIT
until grep -q "^step $kill_at loss" "$work/killed.log"; do
    kill -0 "$job" 2>/dev/null || { cat "$work/killed.log"; echo "run.sh: the job has ended too early" >&2; exit 1; }
    sleep 0.1
done
# The second process of this job: ttprun's child with rank 1.
killed=0
for process in $(pgrep -f "$here/train.py .*--save $work/killed"); do
    if tr '\0' '\n' <"/proc/$process/environ" 2>/dev/null | grep -qx RANK=1; then kill -9 "$process" && killed=1; fi
done
((killed)) || { echo "run.sh: there is no process of rank 1 to kill" >&2; exit 1; }
wait "$job" || { cat "$work/killed.log"; exit 1; }
trap - EXIT
grep -E '^\[ttp\]|^step .* (saved|validation)' "$work/killed.log"

say "4. both runs, bit for bit"
# The killed run may lack the line of a step that was finished and not yet printed; it has no other line.
losses() { grep -hE '^step [0-9]+ (loss|validation loss)' "$1" | sort -u; }
other=$(comm -13 <(losses "$work/undisturbed.log") <(losses "$work/killed.log"))
[[ -z $other ]] || { echo "run.sh: only in the killed run:"; echo "$other"; exit 1; } >&2
echo "$(losses "$work/killed.log" | wc -l) lines of losses, each one as in the undisturbed run"
$python - "$work/undisturbed" "$work/killed" "iter_$(printf %07d "$steps")/mp_rank_00" <<'EOF'
import sys
import torch

def same(one, two):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    return all(map(same, one, two)) if isinstance(one, list) else True

first, second, part = sys.argv[1:]
for name in ("model_optim_rng.pt", "distrib_optim.pt"):
    states = [torch.load(f"{folder}/{part}/{name}", weights_only=False) for folder in (first, second)]
    if not same(*states):
        sys.exit(f"run.sh: {name} differs")
    print(f"{name}: every tensor is the same")
EOF

say "5. continue a text"
$python "$here/generate.py" "$work/killed" --tokenizer "$work/tokenizer" --new 30 "Return the"
$python "$here/generate.py" "$work/killed" --tokenizer "$work/tokenizer" --new 30 --temperature 0.8 --top-k 40 \
    --top-p 0.95 --repetition-penalty 1.2 "Return the" "This module"

say "6. measure"
$python "$here/evaluate.py" perplexity "$work/killed" --tokenizer "$work/tokenizer" --data "$work/data/valid" --blocks 100

say "7. to Hugging Face's form and back"
$python "$here/convert.py" to-hf "$work/killed" "$work/hf" --tokenizer "$work/tokenizer"
$python "$here/convert.py" from-hf "$work/hf" "$work/back"
$python "$here/evaluate.py" perplexity "$work/back" --tokenizer "$work/tokenizer" --data "$work/data/valid" --blocks 100
say "done: $work"
