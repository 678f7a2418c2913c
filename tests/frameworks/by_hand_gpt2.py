r"""Compares examples/gpt2_from_scratch with transformers, by hand.

    pip install --target PACKAGES --no-deps transformers typer
    PYTHONPATH=.cache/frameworks/megatron-core-cpython-311:PACKAGES \\
        python -W ignore -m pytest --noconftest -W ignore tests/frameworks/by_hand_gpt2.py

The suite does without transformers, which Megatron-LM would import in each process. With `TTP_RECORD_GPT2=1`
the results are written to tests/unit/gpt2_reference.json as references of the suite.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPT2LMHeadModel,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.unit.gpt2_model_checks import (
    CONTEXT,
    REFERENCE,
    bpe,
    convert,
    drawn,
    generate,
    hf,
    imported,
    imported_model,
    samples,
)

__all__ = ["bpe", "hf", "imported", "imported_model"]


@pytest.fixture(scope="module")
def theirs(hf: Path) -> Any:
    return GPT2LMHeadModel.from_pretrained(hf, attn_implementation="eager").eval()


@torch.no_grad()
def computed(theirs: Any, folder: Path) -> dict[str, Any]:
    """Return the results with which the suite compares."""
    prompts = drawn(2, 6)
    greedy = theirs.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    blocks = samples(folder)
    total = 0.0
    for n in range(len(blocks)):
        logits = theirs(blocks[n][None, :-1]).logits.double()
        total += float(torch.nn.functional.cross_entropy(logits[0], blocks[n][1:]))
    return {
        "logits": theirs(drawn(3, CONTEXT)).logits[:, :: CONTEXT - 1].tolist(),
        "greedy": greedy.tolist(),
        "perplexity": math.exp(total / len(blocks)),
    }


def test_the_references_of_the_suite(theirs: Any, tmp_path: Path) -> None:
    results = computed(theirs, tmp_path)
    if "TTP_RECORD_GPT2" in os.environ:
        results["logits"] = [
            [[round(logit, 5) for logit in place] for place in row] for row in results["logits"]
        ]
        REFERENCE.write_text(json.dumps(results) + "\n")
    recorded = json.loads(REFERENCE.read_text())
    torch.testing.assert_close(
        torch.tensor(results["logits"]), torch.tensor(recorded["logits"]), rtol=0, atol=1e-4
    )
    assert results["greedy"] == recorded["greedy"]
    assert results["perplexity"] == pytest.approx(recorded["perplexity"], rel=1e-6)


def test_all_logits(theirs: Any, imported_model: Any) -> None:
    tokens = drawn(3, CONTEXT)
    with torch.no_grad():
        torch.testing.assert_close(imported_model(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)


def test_their_own_save_is_imported_bitwise(theirs: Any, hf: Path, imported: Path, tmp_path: Path) -> None:
    """A model goes from transformers to a checkpoint, is exported, and loaded by transformers."""
    theirs.save_pretrained(tmp_path / "saved")
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / "saved" / name).write_bytes((hf / name).read_bytes())
    convert.import_(tmp_path / "saved", tmp_path / "checkpoint")
    convert.export(tmp_path / "checkpoint", tmp_path / "out", hf)
    reloaded = GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    for (name, saved), (_, loaded) in zip(
        theirs.named_parameters(), reloaded.named_parameters(), strict=True
    ):
        assert torch.equal(saved, loaded), name


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.6), (20, 0.9), (1000, 0.001)])
def test_top_k_and_top_p(top_k: int, top_p: float) -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1)) * 3
    expected = TopKLogitsWarper(top_k)(None, logits) if top_k else logits
    expected = TopPLogitsWarper(top_p)(None, expected)
    assert torch.equal(generate.restrict(logits, top_k, top_p), expected)


def test_the_penalty_of_each_row() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(2))
    rows = [[1, 2, 2, 3], [4, 5, 6, 7], [9, 9, 9, 9]]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor(rows), logits)
    assert torch.equal(generate.penalize(logits, rows, 1.7), expected)
