"""The demo's text: real, the same every time, with the vocabulary that Megatron expects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from demo import corpus


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    corpus.write_corpus(folder / "corpus.jsonl")
    corpus.train_tokenizer(folder / "corpus.jsonl", folder / "vocab.json", folder / "merges.txt")
    return folder


def test_at_least_five_megabytes_of_the_standard_library_come_out_the_same_twice(
    data: Path, tmp_path: Path
) -> None:
    files, size = corpus.write_corpus(tmp_path / "again.jsonl")
    assert files > 100
    assert corpus.MINIMUM_BYTES <= size < 2 * corpus.MAXIMUM_BYTES
    assert (tmp_path / "again.jsonl").read_bytes() == (data / "corpus.jsonl").read_bytes()
    with (data / "corpus.jsonl").open(encoding="utf-8") as lines:
        first = json.loads(next(lines))["text"]
    assert first.startswith('"""Record of phased-in incompatible language changes.')  # __future__.py


def test_the_vocabulary_has_the_size_and_the_end_of_text_that_megatron_looks_for(data: Path) -> None:
    vocabulary = json.loads((data / "vocab.json").read_text())
    assert len(vocabulary) == corpus.VOCABULARY
    assert vocabulary[corpus.END_OF_TEXT] == 0
    assert (data / "merges.txt").read_text(encoding="utf-8").startswith("#version")


def test_too_little_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "source_files", lambda: iter([Path(corpus.__file__)]))
    with pytest.raises(ValueError, match=r"only 0\.0 MB of Python sources"):
        corpus.write_corpus(tmp_path / "corpus.jsonl")
