"""Measure a trained model: its perplexity on a text, or how often it names the class of a text.

    python evaluate.py perplexity checkpoints --tokenizer tokenizer --data data/valid
    python evaluate.py classify checkpoints --tokenizer tokenizer --file reviews.jsonl

Every figure comes with the number of samples behind it and a 95 % interval: the figure of another text of the
same kind and size lies in it nearly always.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from data import Blocks
from tokenizer import Tokenizer


@torch.no_grad()
def losses(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return minus the logarithm of the probability of each token but the first: [batch, length - 1]."""
    device = next(model.parameters()).device
    return model(tokens[:, :-1].to(device), labels=tokens[:, 1:].contiguous().to(device)).cpu()


def perplexity(model: Any, text: Blocks, limit: int | None = None) -> dict[str, float]:
    """Return the perplexity of the text (exp of the mean loss), its interval and its counts.

    The blocks are taken as independent samples: tokens within a block are not.
    """
    means = [
        float(losses(model, text[n][None]).double().mean()) for n in range(min(len(text), limit or len(text)))
    ]
    mean = sum(means) / len(means)
    spread = math.sqrt(sum((loss - mean) ** 2 for loss in means) / max(1, len(means) - 1) / len(means))
    low, high = (math.exp(mean + sign * 1.96 * spread) if len(means) > 1 else math.nan for sign in (-1, 1))
    return {
        "perplexity": math.exp(mean),
        "low": low,
        "high": high,
        "blocks": len(means),
        "tokens": len(means) * text.length,
    }


def score(model: Any, tokenizer: Tokenizer, text: str, label: str) -> float:
    """Return the mean logarithm of the probability of the label's tokens behind the text.

    A text that does not fit into the context loses its beginning. Raises ValueError for a label that has
    no room.
    """
    answer = tokenizer.encode(" " + label)
    room = model.shape.context + 1 - len(answer)
    if room < 1:
        raise ValueError(f"label {label!r} has {len(answer)} tokens: the context is {model.shape.context}")
    question = [tokenizer.end or 0, *tokenizer.encode(text)][-room:]
    return -float(losses(model, torch.tensor([question + answer]))[0, -len(answer) :].mean())


def wilson(right: int, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, which is right also near 0 and 1 and for few samples."""
    z = 1.96
    middle = (right + z * z / 2) / (count + z * z)
    half = z / (count + z * z) * math.sqrt(right * (count - right) / count + z * z / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def classify(
    model: Any, tokenizer: Tokenizer, samples: Sequence[tuple[str, str]], question: str
) -> dict[str, Any]:
    """Let the model choose among the labels that occur; return the share of right choices, and its interval.

    Args:
        samples: text and label of each.
        question: stands between text and label.
    """
    labels = sorted({label for _, label in samples})
    right = 0
    for text, label in samples:
        scores = [score(model, tokenizer, text + question, label) for label in labels]
        right += labels[scores.index(max(scores))] == label
    low, high = wilson(right, len(samples))
    largest_class = Counter(label for _, label in samples).most_common(1)[0][1]
    return {
        "accuracy": right / len(samples),
        "low": low,
        "high": high,
        "samples": len(samples),
        "always_the_most_frequent": largest_class / len(samples),
    }


def samples_in(path: Path, text: str, label: str) -> list[tuple[str, str]]:
    """Read a JSON object in each line. Raises ValueError for a line that lacks a column, and for no line."""
    samples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {number} is no JSON: {error}") from None
        for column in (text, label):
            if not isinstance(row, dict) or not isinstance(row.get(column), str) or not row[column].strip():
                has = sorted(row) if isinstance(row, dict) else type(row).__name__
                raise ValueError(f"{path}: line {number} has no text in column {column!r}; it has {has}")
        samples.append((row[text], row[label]))
    if not samples:
        raise ValueError(f"{path} has no samples")
    return samples


def count(text: str) -> int:
    """Read a number from 1 on, of the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="measure a trained model")
    commands = parser.add_subparsers(dest="command", required=True)
    perplexity_command = commands.add_parser("perplexity")
    two = commands.add_parser("classify")
    for command in (perplexity_command, two):
        command.add_argument("checkpoint", type=Path, help="folder of checkpoints")
        command.add_argument("--tokenizer", type=Path, required=True)
    perplexity_command.add_argument("--data", type=Path, required=True, help="an encoded text, without .bin")
    perplexity_command.add_argument("--blocks", type=count, help="only the first ones")
    two.add_argument("--file", type=Path, required=True, help='a line each: {"text": ..., "label": ...}')
    two.add_argument("--text", default="text", help="the column of texts")
    two.add_argument("--label", default="label", help="the column of labels")
    two.add_argument("--question", default="\nThis is about", help="stands between text and label")
    args = parser.parse_args()
    import checkpoint

    try:
        tokenizer = Tokenizer.load(args.tokenizer)
        if args.command == "perplexity":
            model = checkpoint.load(args.checkpoint, tokenizer)
            text = Blocks(args.data, model.shape.context, model.shape.vocabulary)
            measured = perplexity(model, text, args.blocks)
            print(
                f"perplexity {measured['perplexity']:.3f} "
                f"(95 % interval {measured['low']:.3f} to {measured['high']:.3f}), "
                f"{measured['tokens']} tokens in {measured['blocks']} blocks"
            )
        else:
            samples = samples_in(args.file, args.text, args.label)
            model = checkpoint.load(args.checkpoint, tokenizer)
            measured = classify(model, tokenizer, samples, args.question)
            print(
                f"accuracy {measured['accuracy']:.3f} "
                f"(95 % interval {measured['low']:.3f} to {measured['high']:.3f}), "
                f"{measured['samples']} samples; always the most frequent label: "
                f"{measured['always_the_most_frequent']:.3f}"
            )
    except (OSError, ValueError) as error:
        parser.exit(2, f"evaluate.py: {error}\n")


if __name__ == "__main__":
    main()
