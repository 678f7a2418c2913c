"""The command, the data and the arguments with which MindSpeed-LLM's `posttrain_gpt.py` tunes a tiny GPT.

peft, transformers and their dependencies are the real ones, in a folder that precedes the stand-ins for the
parts of an Ascend machine.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.faults.harness import ITERATIONS, ROOT, Job
from tests.frameworks import args

STANDINS = ROOT / "tests/standins"
SEQUENCE = 64
VOCABULARY = 400
WORDS = ("alpha", "beta", "gamma", "delta", "river", "stone", "light", "cloud", "seven", "blue", "tiger")
# As `args.TINY`, with the data of an instruction.
TINY = f"""
    --use-mcore-models --num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128
    --seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --position-embedding-type rope
    --untie-embeddings-and-output-weights --disable-bias-linear
    --make-vocab-size-divisible-by 1 --padded-vocab-size {VOCABULARY}
    --tokenizer-type PretrainedFromHF --num-workers 0 --split 100,0,0 --prompt-type qwen
    --micro-batch-size 1 --global-batch-size 8 --hidden-dropout 0.1 --attention-dropout 0.1
    --init-method-std 0.02 --lr 1e-3 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 2
    --clip-grad 1.0 --weight-decay 0.1 --eval-iters 0 --eval-interval 1000000 --log-interval 1
    --distributed-timeout-minutes 2 --bf16
"""
SFT = ("--stage", "sft", "--is-instruction-dataset")
# In the options of a job: the folder of the model that it begins from.
BASE = "BASE"
# Run with transformers: a tokenizer of a few hundred tokens, in the form that AutoTokenizer loads.
_TOKENIZER = """
import sys
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>"]
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=int(sys.argv[3]), special_tokens=special, initial_alphabet=alphabet)
bpe.train([sys.argv[1]], trainer)
fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=special[2], pad_token=special[0])
fast.save_pretrained(sys.argv[2])
"""
# Run with bitsandbytes: the matrices of the layers in 4 bits, as the framework's `convert_ckpt.py
# --qlora-nf4` makes them (`saver.py:_replace_bnb_4bit_in_layer`).
_QUANTIZE = """
import sys
import bitsandbytes.functional
import torch
for path in sys.argv[1:]:
    file = torch.load(path, map_location="cpu", weights_only=False)
    for name in [name for name in file["model"] if ".linear_" in name and name.endswith(".weight")]:
        if file["model"][name].dim() == 2:
            bits, state = bitsandbytes.functional.quantize_4bit(
                file["model"][name], quant_type="nf4", compress_statistics=True
            )
            file["model"][name] = bits
            file["model"] |= {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
    torch.save(file, path)
"""


def _environment(*path: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTORCH_JIT": "0",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def _run(environment: dict[str, str], *arguments: object) -> None:
    command = [sys.executable, *map(str, arguments)]
    completed = subprocess.run(
        command, env=args.environment(**environment), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stdout[-3000:] + completed.stderr[-3000:]


def script(tree: Path) -> Path | None:
    """Return the tuning script of a checkout of MindSpeed-LLM or ModelLink; None for Megatron-LM."""
    names = {"mindspeed_llm": "posttrain_gpt.py", "modellink": "pretrain_gpt.py"}
    return next((tree / name for package, name in names.items() if (tree / package).is_dir()), None)


def quantize(base: Path, tree: Path, packages: Path) -> Path:
    """Return a copy of a checkpoint of the framework in `tree` whose layers have 4-bit weights, for QLoRA."""
    copy = base.with_name("save-nf4")
    if not copy.exists():
        draft = base.with_name("save-nf4.draft")
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(base, draft)
        _run(
            _environment(packages, STANDINS, tree),
            "-c",
            _QUANTIZE,
            *draft.glob("iter_*/*/model_optim_rng.pt"),
        )
        draft.rename(copy)
    return copy


class Tuning:
    """A `Program` of the harness: a job begins from a base model, and resumes from its own saves.

    Args:
        tree: a checkout of MindSpeed-LLM with `megatron` and `mindspeed`.
        packages: the folder with peft and transformers.
        work: the folder of data and tokenizer.
        base: the model to tune; None: train from nothing.
        options: options of the script for the way of tuning.
        prepared: options of the framework's preprocessing.
    """

    def __init__(
        self,
        tree: Path,
        packages: Path,
        work: Path,
        base: Path | None = None,
        options: tuple[str, ...] = SFT,
        prepared: tuple[str, ...] = (),
    ) -> None:
        self._tree, self._work, self._base, self._options = tree, work, base, options
        # ModelLink has no stages but DPO's.
        self._words = options[2:] if (tree / "modellink").is_dir() and options[:2] == SFT[:2] else options
        # Where apex is found, Megatron-LM of the others would take it.
        apex = (STANDINS / "with_apex",) if (tree / "modellink").is_dir() else ()
        self.environment = _environment(packages, STANDINS, *apex)
        self._data = self._prepare(prepared)

    def __call__(self, job: Job) -> list[str]:
        layout = job.layout
        arguments = [*shlex.split(args.PLAIN), *shlex.split(TINY), "--train-iters", str(ITERATIONS)]
        arguments += [
            "--data-path",
            str(self._data),
            "--tokenizer-name-or-path",
            str(self._work / "tokenizer"),
        ]
        arguments += ["--tensor-model-parallel-size", str(layout.tp)]
        # Up to Megatron-core 0.8 there is no option for the format, which is torch.
        if "--ckpt-format" in (self._tree / "megatron/training/arguments.py").read_text():
            arguments += ["--ckpt-format", "torch"]
        if layout.distributed_optimizer:
            arguments += ["--use-distributed-optimizer"]
        if job.save is not None:
            arguments += ["--save", str(job.save), "--save-interval", str(job.save_interval)]
        if job.load is not None and "--lora-ckpt-filter" in self._options:
            # The framework's own way.
            arguments += ["--load", str(self._base), "--lora-load", str(job.load)]
        elif job.load is not None:
            arguments += ["--load", str(job.load)]
        elif self._base is not None:
            arguments += ["--load", str(self._base), "--finetune"]
        return [
            str(script(self._tree)),
            *arguments,
            *layout.arguments,
            *(str(self._base) if word == BASE else word for word in self._words),
            *job.arguments,
        ]

    def _prepare(self, prepared: tuple[str, ...]) -> Path:
        """Preprocess 400 short instructions with the framework; return the prefix of the written files."""
        work = self._work
        prefix = work / "-".join(["data", *(word.lstrip("-") for word in prepared)]) / "instructions"
        if prefix.parent.is_dir():
            return prefix
        draft = prefix.parent.with_suffix(".draft")
        draft.mkdir(parents=True, exist_ok=True)
        source = work / "instructions.json"
        if not source.exists():
            drawn = random.Random(1234)

            def words(least: int, maximum: int) -> str:
                return " ".join(drawn.choice(WORDS) for _ in range(drawn.randint(least, maximum)))

            columns = {"instruction": (1, 3), "input": (0, 2), "output": (1, 5)}
            columns |= {"chosen": (1, 5), "rejected": (1, 5), "text": (20, 60)}
            rows = [{name: words(*limits) for name, limits in columns.items()} for _ in range(400)]
            source.write_text(json.dumps(rows))
        if not (work / "tokenizer").is_dir():
            _run(self.environment, "-c", _TOKENIZER, source, work / "tokenizer", VOCABULARY)
        _run(
            self.environment,
            *("-m", "adaptor.devices", "cpu", self._tree / "preprocess_data.py"),
            *("--input", source, "--tokenizer-name-or-path", work / "tokenizer"),
            *("--output-prefix", draft / prefix.name),
            *("--tokenizer-type", "PretrainedFromHF", "--handler-name", "AlpacaStyleInstructionHandler"),
            *(() if "GeneralPretrainHandler" in prepared else ("--prompt-type", "qwen")),
            *("--workers", "1", "--log-interval", "1000"),
            *("--seq-length", SEQUENCE, *prepared),
        )
        draft.rename(prefix.parent)
        return prefix


class MegatronSft:
    """A `Program` of the harness: `pretrain_gpt.py --sft` of Megatron-LM 0.15 and later.

    Args:
        tree: a checkout of Megatron-LM.
        packages: the folder with transformers and datasets.
        work: for data and tokenizer.
        base: of the model to tune; None: it is trained from nothing.
    """

    def __init__(self, tree: Path, packages: Path, work: Path, base: Path | None = None) -> None:
        self._tree, self._work, self._base = tree, work, base
        self.environment = {**_environment(packages), "HF_HOME": str(work / "cache")}
        self._data = work / "conversations.jsonl"
        if not self._data.exists():
            self._prepare()

    def __call__(self, job: Job) -> list[str]:
        layout = job.layout
        load = job.load or self._base
        arguments = args.tiny_gpt(
            train_iters=ITERATIONS,
            save=job.save,
            load=load,
            save_interval=job.save_interval,
            precision=layout.precision,
            tp=layout.tp,
            distributed_optimizer=layout.distributed_optimizer,
            extra=(
                *("--sft", "--sft-tokenizer-prompt-format", "nemotron-nano-v2", "--legacy-tokenizer"),
                *("--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(self._work / "tokenizer")),
                *("--data-path", str(self._data), "--no-create-attention-mask-in-dataloader"),
                *("--seq-length", str(SEQUENCE), "--max-position-embeddings", str(SEQUENCE)),
                *(("--finetune",) if job.load is None and load is not None else ()),
                *layout.arguments,
                *(layout.reference if job.launcher == "torchrun" else ()),
                *job.arguments,
            ),
        )
        return [str(self._tree / "pretrain_gpt.py"), *arguments]

    def _prepare(self) -> None:
        """Write 400 conversations, and a tokenizer trained on them."""
        drawn = random.Random(1234)
        self._work.mkdir(parents=True, exist_ok=True)
        lines = []
        for _ in range(400):
            roles = {
                role: " ".join(drawn.choice(WORDS) for _ in range(drawn.randint(2, 5)))
                for role in ("system", "user", "assistant")
            }
            turns = [{"role": role, "content": content} for role, content in roles.items()]
            lines.append(json.dumps({"messages": turns}))
        self._data.write_text("\n".join(lines) + "\n")
        _run(self.environment, "-c", _TOKENIZER, self._data, self._work / "tokenizer", VOCABULARY)
