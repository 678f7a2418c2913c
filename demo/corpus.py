"""Real text for the demo: the machine's Python standard library, and a tokenizer trained on the text."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

MINIMUM_BYTES = 5_000_000
MAXIMUM_BYTES = 9_000_000  # keeps the preparation to seconds
VOCABULARY = 8192
END_OF_TEXT = "<|endoftext|>"


def source_files() -> Iterator[Path]:
    """Yield Python sources in an order that depends only on their names: the library, then site-packages.

    The library's own tests come last: they contain more tables than text.
    """
    library = Path(sysconfig.get_path("stdlib"))
    packages = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    modules: list[Path] = []
    tests: list[Path] = []
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if "site-packages" in parts or "dist-packages" in parts:
            continue
        (tests if {"test", "tests", "idle_test"} & set(parts) else modules).append(path)
    yield from modules
    yield from tests
    for folder in sorted(packages):
        yield from sorted(folder.rglob("*.py"))


def write_corpus(path: Path) -> tuple[int, int]:
    """Write a JSON line for each source file, as Megatron's preprocessing reads it.

    Returns:
        The number of files, and the bytes of text.

    Raises:
        ValueError: this machine has less text than the demo needs.
    """
    files = size = 0
    with path.open("w", encoding="utf-8") as out:
        for source in source_files():
            try:
                text = source.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                continue  # a few sources are broken on purpose, as data of tests
            if not text.strip():
                continue
            out.write(json.dumps({"text": text}) + "\n")
            files += 1
            size += len(text.encode())
            if size >= MAXIMUM_BYTES:
                break
    if size < MINIMUM_BYTES:
        raise ValueError(
            f"only {size / 1e6:.1f} MB of Python sources under {sysconfig.get_path('stdlib')},"
            f" at least {MINIMUM_BYTES / 1e6:.0f} MB are needed"
        )
    return files, size


def train_tokenizer(corpus: Path, vocabulary: Path, merges: Path) -> int:
    """Train a byte-level BPE like GPT-2's on the corpus and write its two files; return the token count."""
    from tokenizers import ByteLevelBPETokenizer

    def texts() -> Iterator[str]:
        with corpus.open(encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"]

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts(), vocab_size=VOCABULARY, min_frequency=2, special_tokens=[END_OF_TEXT], show_progress=False
    )
    files = tokenizer.save_model(str(vocabulary.parent), "trained")
    for source, target in zip(files, (vocabulary, merges), strict=True):
        Path(source).replace(target)
    return int(tokenizer.get_vocab_size())
