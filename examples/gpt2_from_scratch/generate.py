"""Continue a text with a trained model.

    python generate.py checkpoints --tokenizer tokenizer "Return the"    # the most probable token each time
    python generate.py checkpoints --tokenizer tokenizer --file prompts.txt --temperature 0.8 --top-k 40

Every line of a file is a prompt; all prompts are continued together, as one batch.
"""

from __future__ import annotations

import argparse
import codecs
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizer import Tokenizer
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """The choice of the next token.

    Attributes:
        temperature: divides the logits: above 1 the choice is freer; 0: always the most probable token.
        top_k: only so many of the most probable tokens may be chosen; 0: all.
        top_p: only the smallest set of tokens with this joint probability may be chosen.
        repetition_penalty: above 1, tokens already in the row become less probable.

    Raises:
        ValueError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}, it must be 0 or more")
        if self.top_k < 0:
            raise ValueError(f"top-k is {self.top_k}, it must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top-p is {self.top_p}, it must be above 0 and at most 1")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition penalty is {self.repetition_penalty}, it must be above 0")


def penalize(logits: Tensor, rows: Sequence[Sequence[int]], penalty: float) -> Tensor:
    """Make the tokens that a row already has less probable in that row.

    Args:
        logits: [batch, vocabulary].
        rows: the tokens of each row so far, prompt and continuation.
    """
    logits = logits.clone()
    for row, tokens in enumerate(rows):
        row_tokens = torch.tensor(sorted(set(tokens)), device=logits.device)
        values = logits[row, row_tokens]
        # Less probable means a lower logit: a positive one is divided, a negative one multiplied.
        logits[row, row_tokens] = torch.where(values > 0, values / penalty, values * penalty)
    return logits


def restrict(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set the logits of tokens that may not be chosen to minus infinity; [batch, vocabulary]."""
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(descending=True)
        shares = ordered.softmax(-1)
        # A token is left out where those before it have the probability already: the first one never is.
        beyond = shares.cumsum(-1) - shares >= top_p
        # `beyond` is in the order of the shares; scatter brings it back to the order of the tokens.
        logits = logits.masked_fill(beyond.scatter(1, order, beyond), -torch.inf)
    return logits


def choose(
    logits: Tensor, rows: Sequence[Sequence[int]], sampling: Sampling, source: torch.Generator
) -> list[int]:
    """Return the next token of each row."""
    logits = logits.float()
    if sampling.repetition_penalty != 1:
        logits = penalize(logits, rows, sampling.repetition_penalty)
    if sampling.temperature == 0:
        return logits.argmax(-1).tolist()
    shares = restrict(logits / sampling.temperature, sampling.top_k, sampling.top_p).softmax(-1)
    return torch.multinomial(shares.cpu(), 1, generator=source)[:, 0].tolist()


@torch.no_grad()
def generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    new: int,
    end: int | None = None,
    tokens: int | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    cached: bool = True,
) -> Iterator[list[int | None]]:
    """Continue the prompts together; yield the next token of each row, None where it has ended, step by step.

    A row ends after the token `end`, which is yielded, after `new` tokens, or where the context is full.
    Shorter prompts are filled up at their left, and the model is told how many places: no token has the
    meaning of a filling, so any token may stand in a prompt.

    Args:
        prompts: token numbers.
        tokens: how many tokens the tokenizer has; further rows of the model's vocabulary are never chosen.
        cached: keep keys and values of earlier tokens; without it all is computed again in each step.

    Raises:
        ValueError: a prompt is empty, or as long as the context or longer, or a number is no token.
    """
    sampling = sampling or Sampling()
    context, vocabulary = model.shape.context, tokens or model.shape.vocabulary
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise ValueError(f"prompt {number} is empty: at least one token is needed")
        if len(prompt) >= context:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens: "
                f"the model's context of {context} leaves no room to continue it"
            )
        if not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise ValueError(f"prompt {number} has token {max(prompt)}: the vocabulary has {vocabulary}")
    if not prompts:
        return
    device = next(model.parameters()).device
    source = torch.Generator().manual_seed(seed)
    rows = [list(prompt) for prompt in prompts]
    longest = max(map(len, rows))
    padding = torch.tensor([longest - len(row) for row in rows], device=device)
    tokens_so_far = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    has_ended = [False] * len(rows)
    cache, fresh = None, tokens_so_far
    for _ in range(new):
        logits, cache = model.step(fresh, padding, cache if cached else None)
        chosen = choose(logits[:, :vocabulary], rows, sampling, source)
        yield [None if has_ended[row] else token for row, token in enumerate(chosen)]
        for row, token in enumerate(chosen):
            if not has_ended[row]:
                rows[row].append(token)
                has_ended[row] = token == end or len(rows[row]) == context
        if all(has_ended):
            return
        # An ended row is computed further with the others; its result is not used.
        last = torch.tensor(chosen, device=device)[:, None]
        tokens_so_far = torch.cat([tokens_so_far, last], dim=1)
        fresh = last if cached else tokens_so_far


def complete(model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """Return each prompt with its continuation; the options are those of `generate`."""
    rows = [list(prompt) for prompt in prompts]
    for step in generate(model, prompts, **options):
        for row, token in zip(rows, step, strict=True):
            if token is not None:
                row.append(token)
    return rows


def stream(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """Yield text as soon as its characters are complete: a token may end within a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        yield decoder.decode(tokenizer.decode_bytes([token]))
    yield decoder.decode(b"", final=True)


def prompts_in(path: Path) -> list[str]:
    """Return the lines of a file, each of which is a prompt. Raises ValueError for a line without text."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            raise ValueError(f"{path}: line {number} is an empty prompt")
    return lines


def count(text: str) -> int:
    """Read a number from 1 on, of the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="continue texts with a trained model")
    parser.add_argument("checkpoint", type=Path, help="folder of checkpoints")
    parser.add_argument("prompt", nargs="*", help="each is continued")
    parser.add_argument("--file", type=Path, help="a prompt in each line")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--new", type=count, default=40, help="tokens at most")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the most probable token each time")
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-cache", action="store_true")
    args = parser.parse_intermixed_args()  # prompts may stand behind options
    try:
        sampling = Sampling(args.temperature, args.top_k, args.top_p, args.repetition_penalty)
        texts = args.prompt + (prompts_in(args.file) if args.file else [])
        if not texts:
            raise ValueError("no prompt: give one, or --file")
        import checkpoint

        tokenizer = Tokenizer.load(args.tokenizer)
        model = checkpoint.load(args.checkpoint, tokenizer)
        steps = generate(
            model,
            [tokenizer.encode(text) for text in texts],
            new=args.new,
            end=tokenizer.end,
            tokens=len(tokenizer),
            sampling=sampling,
            seed=args.seed,
            cached=not args.no_cache,
        )
        if len(texts) == 1:
            first = next(steps, [tokenizer.end])  # what is wrong with the prompt is said before it is printed
            print(texts[0], end="", flush=True)
            continuation = (
                row[0] for row in itertools.chain([first], steps) if row[0] not in (None, tokenizer.end)
            )
            for piece in stream(tokenizer, continuation):
                print(piece, end="", flush=True)
            print()
        else:
            rows: list[list[int]] = [[] for _ in texts]
            for step in steps:
                for row, token in zip(rows, step, strict=True):
                    row += [] if token in (None, tokenizer.end) else [token]
            for text, row in zip(texts, rows, strict=True):
                print(text + tokenizer.decode(row))
    except (OSError, ValueError) as error:
        parser.exit(2, f"generate.py: {error}\n")


if __name__ == "__main__":
    main()
