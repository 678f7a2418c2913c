"""The tokenizer of examples/gpt2_from_scratch agrees with Hugging Face's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import ByteLevelBPETokenizer

from tests.unit.gpt2_example import FOLDER, module

tokenizer = module("tokenizer")

# Pages of this repository: English, code, tables, symbols.
TEXTS = [
    path.read_text(encoding="utf-8") for path in sorted((FOLDER.parents[1] / "docs").glob("*s.md"))[:6]
] + ["Grüße, naïve café — 東京の天気 😀😀 👩‍👩‍👧 aaaaaaaa   \t\n\n"] * 3
SIZE = 700
ALPHABETS = (
    *(
        "abcdefghijklmnopqrstuvwxyz",
        "ABC 123",
        "  \t\n\r\u00a0\u2003\x0b\x1c\x85",
        "'s't're've'm'll'd",
        ".,:;!?()[]{}#-_=+*/",
    ),
    *("äöüßéèñçøåłžő", "абвгдежз", "αβγδε", "你好世界東京", "안녕하세요", "مرحبا", "שלום", "नमस्ते", "٣٤٥½²Ⅷ"),
    *("😀😁🤖🚀👍🏽", "👩‍👩‍👧‍👦", "🇩🇪🇫🇷", "\u0301\u0308\u200d\ufe0f\u200b\ufeff\ufffd\x00\x7f"),
)


def strings(count: int) -> list[str]:
    """Draw strings from a seed; every third is decoded from broken UTF-8."""
    draw = random.Random(20261123)
    texts = []
    for n in range(count):
        text = "".join(
            "".join(draw.choices(draw.choice(ALPHABETS), k=draw.randint(1, 6)))
            for _ in range(draw.randint(0, 12))
        )
        texts.append(broken(text, draw).decode("utf-8", "replace") if n % 3 == 0 else text)
    return texts


def broken(text: str, draw: random.Random) -> bytes:
    """Return UTF-8 with some bytes lost and some inserted."""
    raw = bytearray(byte for byte in text.encode() if draw.random() > 0.1)
    for _ in range(draw.randint(1, 4)):
        raw.insert(draw.randint(0, len(raw)), draw.randint(128, 255))
    return bytes(raw)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Hugging Face's tokenizer trained on the texts, and the folder of its two files."""
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        TEXTS, vocab_size=SIZE, min_frequency=2, special_tokens=[tokenizer.END_OF_TEXT], show_progress=False
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    trained.save_model(str(folder))
    return trained, folder


def test_a_thousand_strings_with_emoji_and_broken_utf8(reference: tuple[Any, Path]) -> None:
    theirs, folder = reference
    own_tokenizer = tokenizer.Tokenizer.load(folder)
    for text in strings(1000):
        numbers = own_tokenizer.encode(text)
        assert numbers == theirs.encode(text).ids, repr(text)
        assert own_tokenizer.decode(numbers) == text


def test_tokens_that_are_cut_within_a_character_decode_the_same(reference: tuple[Any, Path]) -> None:
    theirs, folder = reference
    own_tokenizer = tokenizer.Tokenizer.load(folder)
    draw = random.Random(1)
    for _ in range(300):
        numbers = draw.choices(range(1, len(own_tokenizer)), k=draw.randint(1, 8))
        assert own_tokenizer.decode(numbers) == theirs.decode(numbers, skip_special_tokens=False)


def test_bytes_that_are_no_utf8_come_back(reference: tuple[Any, Path]) -> None:
    own_tokenizer = tokenizer.Tokenizer.load(reference[1])
    draw = random.Random(2)
    for text in strings(200):
        raw = broken(text, draw)
        assert own_tokenizer.decode_bytes(own_tokenizer.encode(raw)) == raw


def test_training_finds_the_same_merges(reference: tuple[Any, Path], tmp_path: Path) -> None:
    own_tokenizer = tokenizer.train(TEXTS, SIZE)
    own_tokenizer.save(tmp_path)
    assert (tmp_path / "merges.txt").read_text() == (reference[1] / "merges.txt").read_text()
    assert own_tokenizer.vocabulary == reference[0].get_vocab()


def test_the_end_of_text_is_one_token(reference: tuple[Any, Path]) -> None:
    own_tokenizer = tokenizer.Tokenizer.load(reference[1])
    numbers = own_tokenizer.encode("one<|endoftext|>two<|endoftext|>")
    assert numbers.count(own_tokenizer.end) == 2
    assert numbers[-1] == own_tokenizer.end
    assert own_tokenizer.decode(numbers) == "one<|endoftext|>two<|endoftext|>"


def test_the_last_merge_counts_without_an_end_of_line(reference: tuple[Any, Path], tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_bytes((reference[1] / "vocab.json").read_bytes())
    (tmp_path / "merges.txt").write_text((reference[1] / "merges.txt").read_text().removesuffix("\n"))
    assert tokenizer.Tokenizer.load(tmp_path).merges == tokenizer.Tokenizer.load(reference[1]).merges


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda vocabulary, merges: vocabulary.pop("A"),
            "'A' is merged, or is a byte, and is not in the vocabulary",
        ),
        (lambda vocabulary, merges: merges.append(("th", "xyz")), "'xyz' is merged"),
        (lambda vocabulary, merges: vocabulary.update(A=9999), "are not 0 to 699"),
    ],
    ids=["a byte is missing", "a merge of what is no token", "a number too high"],
)
def test_files_that_do_not_fit_each_other(change: Any, message: str, reference: tuple[Any, Path]) -> None:
    valid = tokenizer.Tokenizer.load(reference[1])
    vocabulary, merges = dict(valid.vocabulary), list(valid.merges)
    change(vocabulary, merges)
    if "A" not in vocabulary:
        vocabulary["another"] = valid.vocabulary["A"]
    with pytest.raises(ValueError, match=message):
        tokenizer.Tokenizer(vocabulary, merges)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "vocab.json is no JSON: "),
        ("[1]", "vocab.json is no vocabulary"),
        ('{"a": "1"}', "is no vocabulary"),
    ],
)
def test_a_file_that_is_no_vocabulary(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        tokenizer.Tokenizer.load(tmp_path)


def test_a_vocabulary_too_small() -> None:
    with pytest.raises(ValueError, match="a vocabulary of 256 has no room"):
        tokenizer.train(TEXTS, 256)
