"""From a text to blocks of token numbers.

    python data.py corpus --out text                                             # text of this machine
    python data.py encode text/train.txt --tokenizer tokenizer --out data/train    # data/train.bin and .idx

`corpus` writes the docstrings of Python's standard library in the form of WikiText: a line
` = Title = `, then paragraphs. `encode` cleans it and stores the numbers in Megatron's format: `.bin` has the
tokens of all passages one after the other, `.idx` says where each one begins. Real WikiText has this form.
"""

from __future__ import annotations

import argparse
import ast
import re
import struct
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

# WikiText separates every sign by spaces. In this order:
_CLEANING = [
    (r" '(s|t|re|ve|m|ll|d)\b", r"'\1"),
    (r"s '", "s'"),
    (r"' (\d)", r"'\1"),  # the ' 90s
    (r" @([-,.])@ ", r"\1"),  # 1 @,@ 000 and well @-@ known
    (r" ([:;.!?,]) ", r"\1 "),
    (r" \.", "."),
    (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r'"\s*([^"]*?)\s*"', r'"\1"'),
    (r"(?<!\w)'\s+([^']*?)\s+'", r"'\1'"),
    (r" ° ", "°"),
]


def clean(line: str) -> str:
    """Return a line of WikiText as people write: `( 1 @,@ 000 , say )` is `(1,000, say)`."""
    for pattern, replacement in _CLEANING:
        line = re.sub(pattern, replacement, line)
    return line


def passages(path: Path) -> Iterator[str]:
    """Yield the text between two headings, cleaned, a paragraph in each line; the last passage included.

    Raises ValueError if there is no passage.
    """
    passage: list[str] = []
    has_heading = False
    with path.open(encoding="utf-8") as lines:
        for line in [*lines, "= end ="]:
            line = line.strip()
            if len(line) > 1 and line.startswith("=") and line.endswith("="):
                if passage:
                    yield "\n".join(passage)
                    has_heading = True
                passage = []
            elif line:
                passage.append(clean(line))
    if not has_heading:
        raise ValueError(f"{path} has no text")


# -- Megatron's .bin and .idx ---------------------------------------------------------------------------

_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_KINDS = {4: numpy.dtype("int32"), 8: numpy.dtype("uint16")}


def paths(prefix: Path) -> tuple[Path, Path]:
    """Return prefix.bin and prefix.idx, also where the prefix itself has a dot."""
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


def write_tokens(prefix: Path, documents: Iterable[list[int]], vocabulary: int) -> int:
    """Write `prefix.bin` and `prefix.idx`; return the number of tokens.

    Args:
        prefix: path without the ending.
        documents: the numbers of each, its end of text included.
        vocabulary: the number of tokens there are; up to 65,535, two bytes hold a token.
    """
    code = 8 if vocabulary < 65_536 else 4
    kind = _KINDS[code]
    data, index = paths(prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    sizes: list[int] = []
    with data.open("wb") as out:
        for document in documents:
            out.write(numpy.array(document, dtype=kind).tobytes())
            sizes.append(len(document))
    # Where each passage begins in .bin, in bytes: the sum of the sizes of all before it.
    starts = numpy.concatenate([[0], numpy.cumsum(sizes)[:-1]]) * kind.itemsize
    with index.open("wb") as out:
        # Sequences, and where documents begin among them: here each document is one sequence.
        out.write(_MAGIC + struct.pack("<QBQQ", _VERSION, code, len(sizes), len(sizes) + 1))
        out.write(numpy.array(sizes, dtype="int32").tobytes())
        out.write(starts.astype("int64").tobytes())
        out.write(numpy.arange(len(sizes) + 1, dtype="int64").tobytes())
    return sum(sizes)


def read_tokens(prefix: Path) -> Any:
    """Return all tokens of `prefix.bin` as one array, which stays on the disk.

    Raises ValueError for files that are not in Megatron's format or do not belong to each other.
    """
    data, index = paths(prefix)
    raw = index.read_bytes()
    head = struct.calcsize("<QBQQ")
    if not raw.startswith(_MAGIC) or len(raw) < len(_MAGIC) + head:
        raise ValueError(f"{index} is no index of Megatron's indexed dataset")
    version, code, count, _ = struct.unpack_from("<QBQQ", raw, len(_MAGIC))
    if version != _VERSION or code not in _KINDS:
        raise ValueError(f"{index} has version {version} and kind {code}: 1, and 4 or 8, are understood")
    if len(raw) < len(_MAGIC) + head + 4 * count:
        raise ValueError(f"{index} is too short for its {count} passages")
    sizes = numpy.frombuffer(raw, "int32", count, len(_MAGIC) + head)
    total = int(sizes.sum(dtype="int64"))
    if data.stat().st_size != total * _KINDS[code].itemsize:
        raise ValueError(
            f"{data} has {data.stat().st_size} bytes, {index} says {total * _KINDS[code].itemsize}"
        )
    return numpy.memmap(data, _KINDS[code], "r")


class Blocks:
    """A text cut into blocks of `length` + 1 tokens: each token but the first is predicted exactly once.

    The last token of a block is the first of the next. A remainder at the end is left out.

    Raises ValueError for a text that is shorter than one block, or has tokens beyond the vocabulary.
    """

    def __init__(self, prefix: Path, length: int, vocabulary: int) -> None:
        self.length = length
        self.tokens = read_tokens(prefix)
        self.count = (len(self.tokens) - 1) // length
        if self.count < 1:
            raise ValueError(f"{prefix} has {len(self.tokens)} tokens: a block needs {length + 1}")
        if int(self.tokens.max()) >= vocabulary:
            raise ValueError(
                f"{prefix} has token {self.tokens.max()}: the model has a vocabulary of {vocabulary}"
            )

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return block `index`: [length + 1] token numbers."""
        if not 0 <= index < self.count:
            raise IndexError(index)
        start = index * self.length
        return torch.from_numpy(self.tokens[start : start + self.length + 1].astype("int64"))

    def batch(self, first: int, size: int, seed: int) -> torch.Tensor:
        """Return samples `first` to `first + size - 1` of an endless stream: [size, length + 1].

        The order in each round through the text follows only from the seed and the number of the round. So a
        training resumed at a sample continues as if it had never stopped.
        """
        rows = []
        for sample in range(first, first + size):
            around, place = divmod(sample, self.count)
            order = numpy.random.default_rng([seed, around]).permutation(self.count)
            rows.append(self[int(order[place])])
        return torch.stack(rows)


# -- commands --------------------------------------------------------------------------------------------


def docstrings(source: str) -> Iterator[str]:
    """Yield the docstrings of a Python source, a paragraph a line."""
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, nodes):
            for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                if paragraph.strip() and not paragraph.lstrip().startswith((">>>", "=")):
                    yield " ".join(paragraph.split())


def write_corpus(folder: Path, limit: int) -> None:
    """Write `train.txt` and `valid.txt`, every tenth module in the latter; `limit`: bytes in all."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: (folder / f"{name}.txt").open("w", encoding="utf-8") for name in ("train", "valid")}
    written = modules = 0
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if {"test", "tests", "site-packages", "dist-packages"} & set(path.relative_to(library).parts):
            continue
        try:
            text = "\n".join(docstrings(path.read_text(encoding="utf-8")))
        except (SyntaxError, UnicodeDecodeError):
            continue
        if text and written < limit:
            written += files["train" if modules % 10 else "valid"].write(f" = {path.stem} = \n\n{text}\n\n")
            modules += 1
    for file in files.values():
        file.close()
    print(f"{modules} modules, {written / 1e6:.1f} MB, in {folder}")


def main() -> None:
    parser = argparse.ArgumentParser(description="make and encode a corpus")
    commands = parser.add_subparsers(dest="command", required=True)
    corpus = commands.add_parser("corpus", help="docstrings of this machine's Python, as WikiText")
    corpus.add_argument("--out", type=Path, required=True)
    corpus.add_argument("--limit", type=int, default=1_000_000, help="bytes of text")
    encode = commands.add_parser("encode", help="a text in the form of WikiText, as .bin and .idx")
    encode.add_argument("text", type=Path)
    encode.add_argument("--tokenizer", type=Path, required=True)
    encode.add_argument("--out", type=Path, required=True, help="path without .bin")
    args = parser.parse_args()
    from tokenizer import Tokenizer

    try:
        if args.command == "corpus":
            write_corpus(args.out, args.limit)
        else:
            tokenizer = Tokenizer.load(args.tokenizer)
            if tokenizer.end is None:
                raise ValueError(f"{args.tokenizer} has no <|endoftext|>, with which each passage ends")
            texts = ([*tokenizer.encode(passage), tokenizer.end] for passage in passages(args.text))
            total = write_tokens(args.out, texts, len(tokenizer))
            print(f"{total} tokens in {args.out}.bin")
    except (OSError, ValueError) as error:
        parser.exit(2, f"data.py: {error}\n")


if __name__ == "__main__":
    main()
