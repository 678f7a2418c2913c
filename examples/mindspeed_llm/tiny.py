"""`python tiny.py OUT`: what the flow needs, small: a Qwen3 of 2 layers, its tokenizer, three sets of data.

OUT/model is a model of Hugging Face with random weights, 4 heads and 2 key-value heads; its tokenizer is
trained on OUT/corpus.json. OUT/alpaca.parquet has the columns of tatsu-lab/alpaca; OUT/mmlu is like MMLU.
"""

from __future__ import annotations

import csv
import json
import random
import sys
from pathlib import Path

import pyarrow
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

WORDS = ["alpha", "beta", "gamma", "delta", "river", "stone", "light", "cloud", "seven", "blue", "tiger"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SUBJECTS = ("anatomy", "astronomy")
VOCABULARY = 400


def words(drawn: random.Random, least: int, maximum: int) -> str:
    return " ".join(drawn.choices(WORDS, k=drawn.randint(least, maximum)))


def write_model(folder: Path, texts: list[str]) -> None:
    """Write a tokenizer of up to `VOCABULARY` tokens, and the model in bf16."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=SPECIAL[2], pad_token=SPECIAL[0])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1234)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # they are ones: a mistake of the conversion would not show
                weight += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)


def write_mmlu(folder: Path, drawn: random.Random) -> None:
    for part, count in (("test", 6), ("dev", 5)):
        (folder / part).mkdir(parents=True, exist_ok=True)
        for subject in SUBJECTS:
            with (folder / part / f"{subject}_{part}.csv").open("w", newline="", encoding="utf-8") as file:
                for _ in range(count):
                    choices = [words(drawn, 1, 2) for _ in "ABCD"]
                    csv.writer(file).writerow([words(drawn, 3, 6) + "?", *choices, drawn.choice("ABCD")])


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    drawn = random.Random(1234)
    texts = [words(drawn, 20, 60) for _ in range(300)]
    (out / "corpus.json").write_text(json.dumps([{"text": text} for text in texts]))
    write_model(out / "model", texts)
    rows = [
        {"instruction": words(drawn, 1, 3), "input": words(drawn, 0, 2), "output": words(drawn, 1, 5)}
        for _ in range(200)
    ]
    for row in rows:
        row["text"] = f"{row['instruction']}\n{row['input']}\n{row['output']}"
    parquet.write_table(pyarrow.Table.from_pylist(rows), out / "alpaca.parquet")
    write_mmlu(out / "mmlu", drawn)


if __name__ == "__main__":
    main()
