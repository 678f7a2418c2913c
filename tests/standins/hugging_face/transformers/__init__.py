"""Stands in for transformers: the tokenizer of a folder, and names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import utils

__all__ = [
    "AutoTokenizer",
    "BertTokenizer",
    "DataCollatorForSeq2Seq",
    "GPT2Tokenizer",
    "PreTrainedTokenizerBase",
    "utils",
]


class AutoTokenizer:
    """Tokens are their own names; the last of `vocab_size` ends a text."""

    additional_special_tokens: tuple[str, ...] = ()

    def __init__(self, vocab_size: int) -> None:
        self.vocab = {str(token): token for token in range(vocab_size)}
        self.eos_token_id = self.pad_token_id = self.cls_token_id = self.sep_token_id = vocab_size - 1

    @classmethod
    def from_pretrained(cls, folder: str, **kwargs: Any) -> AutoTokenizer:
        """`folder` has a tokenizer_config.json that says `vocab_size`."""
        return cls(int(json.loads((Path(folder) / "tokenizer_config.json").read_text())["vocab_size"]))

    def get_vocab(self) -> dict[str, int]:
        return self.vocab

    def __len__(self) -> int:
        return len(self.vocab)


class _NameAlone:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(type(self).__name__)


class BertTokenizer(_NameAlone): ...


class GPT2Tokenizer(_NameAlone): ...


class DataCollatorForSeq2Seq(_NameAlone): ...


class PreTrainedTokenizerBase(_NameAlone): ...
