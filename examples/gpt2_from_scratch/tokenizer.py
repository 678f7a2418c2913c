"""GPT-2's tokenizer, written out: byte-level byte-pair encoding (BPE).

python tokenizer.py corpus.txt --vocabulary 1000 --out tokenizer    # train: vocab.json and merges.txt

Text becomes bytes, so that no text is unknown. Bytes that often stand side by side are merged into one token,
and so are tokens; `merges.txt` lists the merges in the order of the training, in which `encode` also applies
them. `vocab.json` gives each token its number.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import heapq
import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import regex
from registry import register

END_OF_TEXT = "<|endoftext|>"
# A merge never crosses a border of these pieces: a word with the space before it, a number, a group of signs.
PIECES = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def byte_letters() -> dict[int, str]:
    """Return a visible letter for each byte, so that tokens can be written into a text file.

    Printable characters of Latin-1 stand for themselves, the other 68 bytes for the letters from U+0100 on.
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    unprintable = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + n) for n, byte in enumerate(unprintable)
    }


LETTERS = byte_letters()
BYTES = {letter: byte for byte, letter in LETTERS.items()}


@register("tokenizer", "gpt2")
class Tokenizer:
    """Encode text as token numbers, and decode them.

    Args:
        vocabulary: the number of each token, from 0 without a gap.
        merges: pairs of tokens, the earliest found first.
    """

    def __init__(self, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> None:
        if sorted(vocabulary.values()) != list(range(len(vocabulary))):
            raise ValueError(
                f"the numbers of the {len(vocabulary)} tokens are not 0 to {len(vocabulary) - 1}"
            )
        missing = [token for pair in merges for token in (*pair, "".join(pair)) if token not in vocabulary]
        missing += [letter for letter in LETTERS.values() if letter not in vocabulary]
        if missing:
            raise ValueError(f"{missing[0]!r} is merged, or is a byte, and is not in the vocabulary")
        self.vocabulary = vocabulary
        self.merges = merges
        self.tokens = sorted(vocabulary, key=vocabulary.__getitem__)
        self.end = vocabulary.get(END_OF_TEXT)
        self._rank = {pair: rank for rank, pair in enumerate(merges)}
        self._cache: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def digest(self) -> str:
        """Return a hash of tokens and merges; a checkpoint identifies its tokenizer by this hash."""
        return hashlib.sha256(json.dumps([self.tokens, self.merges]).encode()).hexdigest()[:16]

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read `vocab.json` and `merges.txt`, of this file or of GPT-2.

        Raises ValueError for files that are no tokenizer.
        """
        path = folder / "vocab.json"
        try:
            vocabulary = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}") from None
        if not isinstance(vocabulary, dict) or any(type(n) is not int for n in vocabulary.values()):
            raise ValueError(f"{path} is no vocabulary: it must give each token its number")
        merges = []
        # Only "\n" ends a line: a token may hold other characters that splitlines() takes for an end. The
        # last merge counts whether or not a "\n" follows it.
        for line in (folder / "merges.txt").read_text(encoding="utf-8").split("\n"):
            if line and not line.startswith("#version"):
                first, space, second = line.partition(" ")
                if not space:
                    raise ValueError(f"{folder / 'merges.txt'} has the line {line!r}: a merge is two tokens")
                merges.append((first, second))
        return cls(vocabulary, merges)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.vocabulary, ensure_ascii=False)
        (folder / "vocab.json").write_text(text, encoding="utf-8")
        lines = ["#version: 0.2", *(f"{first} {second}" for first, second in self.merges)]
        (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def encode(self, text: str | bytes) -> list[int]:
        """Return the numbers of the tokens of `text`.

        `END_OF_TEXT` within it becomes its one token. `decode_bytes` gives bytes back that are no UTF-8.
        """
        if isinstance(text, bytes):
            # A byte that is no UTF-8 becomes a character of its own (a lone surrogate); `_encode_piece`
            # makes it that byte again.
            text = text.decode("utf-8", "surrogateescape")
        numbers: list[int] = []
        for n, part in enumerate(text.split(END_OF_TEXT) if self.end is not None else [text]):
            if n:
                numbers.append(self.end)
            for piece in PIECES.findall(part):
                numbers += self._encode_piece(piece)
        return numbers

    def _encode_piece(self, piece: str) -> list[int]:
        if piece not in self._cache:
            word = [LETTERS[byte] for byte in piece.encode("utf-8", "surrogateescape")]
            while len(word) > 1:
                # The pair that training merged first; one that it never merged ranks behind all others.
                pair = min(itertools.pairwise(word), key=lambda pair: self._rank.get(pair, len(self._rank)))
                if pair not in self._rank:
                    break
                word = merged(word, pair)
            if len(self._cache) > 100_000:  # text without end must not fill the memory
                self._cache.clear()
            self._cache[piece] = [self.vocabulary[token] for token in word]
        return self._cache[piece]

    def decode_bytes(self, numbers: Iterable[int]) -> bytes:
        return b"".join(
            END_OF_TEXT.encode()
            if number == self.end
            else bytes(BYTES[letter] for letter in self.tokens[number])
            for number in numbers
        )

    def decode(self, numbers: Iterable[int]) -> str:
        """Return text; where tokens end within a character, it has U+FFFD."""
        return self.decode_bytes(numbers).decode("utf-8", "replace")


def merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    """Return `word` with each occurrence of `pair` as one token."""
    result: list[str] = []
    at = 0
    while at < len(word):
        if tuple(word[at : at + 2]) == pair:
            result.append(word[at] + word[at + 1])
            at += 2
        else:
            result.append(word[at])
            at += 1
    return result


def train(texts: Iterable[str], size: int) -> Tokenizer:
    """Make a tokenizer of at most `size` tokens: the most frequent pair is merged, again and again.

    Of equally frequent pairs, the pair whose tokens have the lower numbers is merged. Pairs that occur once
    are not merged.

    Raises ValueError if `size` has no room for the end of text and the 256 bytes.
    """
    tokens = [END_OF_TEXT, *sorted(LETTERS.values())]
    if size < len(tokens):
        raise ValueError(
            f"a vocabulary of {size} has no room: the end of text and 256 bytes are {len(tokens)}"
        )
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # Each different piece once, with how often it occurs.
    pieces = collections.Counter(piece for text in texts for piece in PIECES.findall(text))
    pieces_as_letters = [[LETTERS[byte] for byte in piece.encode("utf-8")] for piece in pieces]
    counts = list(pieces.values())
    frequency: collections.Counter[tuple[str, str]] = collections.Counter()
    occurs_in = collections.defaultdict(set)  # pair: the indices of words that may have it
    for index, word in enumerate(pieces_as_letters):
        for pair in itertools.pairwise(word):
            frequency[pair] += counts[index]
            occurs_in[pair].add(index)

    def entry(pair: tuple[str, str]) -> tuple[int, int, int, tuple[str, str]]:
        return -frequency[pair], vocabulary[pair[0]], vocabulary[pair[1]], pair

    heap = [entry(pair) for pair in frequency]
    heapq.heapify(heap)
    merges: list[tuple[str, str]] = []
    while heap and len(vocabulary) < size:
        count, _, _, pair = heapq.heappop(heap)
        if -count != frequency[pair]:  # an old entry: the pair has lost occurrences to a merge
            if frequency[pair] > 0:
                heapq.heappush(heap, entry(pair))
            continue
        if -count < 2:
            break
        merges.append(pair)
        # Two different pairs may spell the same token, "a" + "bc" and "ab" + "c": it keeps its first number.
        vocabulary.setdefault("".join(pair), len(vocabulary))
        changed = set()
        # Only words that have the pair change: their old pairs are taken off the counts, the new ones added.
        for index in occurs_in.pop(pair):
            old_letters, pieces_as_letters[index] = (
                pieces_as_letters[index],
                merged(pieces_as_letters[index], pair),
            )
            for old in itertools.pairwise(old_letters):
                frequency[old] -= counts[index]
            for new in zip(pieces_as_letters[index], pieces_as_letters[index][1:], strict=False):
                frequency[new] += counts[index]
                occurs_in[new].add(index)
                changed.add(new)
        for new in changed:
            heapq.heappush(heap, entry(new))
    return Tokenizer(vocabulary, merges)


def main() -> None:
    parser = argparse.ArgumentParser(description="train a byte-level BPE tokenizer on a text")
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--vocabulary", type=int, default=1000, help="the number of tokens")
    parser.add_argument("--out", type=Path, required=True, help="folder for vocab.json and merges.txt")
    args = parser.parse_args()
    from data import passages

    try:
        tokenizer = train(passages(args.corpus), args.vocabulary)
    except (OSError, ValueError) as error:
        parser.exit(2, f"tokenizer.py: {error}\n")
    tokenizer.save(args.out)
    print(f"{len(tokenizer)} tokens, {len(tokenizer.merges)} merges, in {args.out}")


if __name__ == "__main__":
    main()
