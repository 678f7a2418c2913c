"""The model of examples/gpt2_from_scratch, and its commands' messages for mistakes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.faults import warm
from tests.frameworks import prepare
from tests.unit.gpt2_example import FOLDER, module

ROOT = FOLDER.parents[1]
generate, evaluate, tokenizer = module("generate"), module("evaluate"), module("tokenizer")


# Mostly imports of torch and Megatron-core, on a shared disk.
@pytest.mark.integration
@pytest.mark.timeout(900)
def test_the_model_in_a_process_of_its_own(tmp_path: Path) -> None:
    """Run the model checks in a process with Megatron-core, whose warnings stay in that process."""
    options = ["--noconftest", "-p", "no:cacheprovider", "-p", "no:xdist", "-q", "-W", "ignore"]
    checks = [f"--basetemp={tmp_path / 'checks'}", "tests/unit/gpt2_model_checks.py"]
    path = os.pathsep.join([str(prepare.megatron_core()), os.environ.get("PYTHONPATH", "")])
    warm.run(
        [sys.executable, "-m", "pytest", *options, *checks],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.STDOUT,
        timeout=900,
        code=0,
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"top_p": 0.0}, "top-p is 0.0, it must be above 0 and at most 1"),
        ({"top_p": 1.5}, "top-p is 1.5, it must be above 0 and at most 1"),
        ({"top_p": float("nan")}, "top-p is nan"),
        ({"top_k": -1}, "top-k is -1, it must be 0"),
        ({"temperature": -0.1}, "temperature is -0.1, it must be 0 or more"),
        ({"repetition_penalty": 0.0}, "repetition penalty is 0.0, it must be above 0"),
    ],
)
def test_a_sampling_out_of_its_range(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate.Sampling(**values)


@pytest.mark.parametrize("text", ["0", "-1", "many", ""])
@pytest.mark.parametrize("command", [generate, evaluate])
def test_a_count_that_is_none(command: ModuleType, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no number from 1 on"):
        command.count(text)


def test_only_so_many_tokens_or_so_much_probability() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.15, 0.3, 0.5]]).log()

    def allowed(top_k: int, top_p: float) -> list[list[int]]:
        return [row.isfinite().nonzero()[:, 0].tolist() for row in generate.restrict(logits, top_k, top_p)]

    assert allowed(2, 1.0) == [[0, 1], [2, 3]]
    assert allowed(0, 0.79) == [[0, 1], [2, 3]]
    assert allowed(0, 0.81) == [[0, 1, 2], [1, 2, 3]]
    assert allowed(0, 0.01) == [[0], [3]]
    assert allowed(99, 1.0) == [[0, 1, 2, 3]] * 2


def test_the_penalty_is_that_of_each_row() -> None:
    logits = torch.tensor([[2.0, -1.0, 3.0], [2.0, -1.0, 3.0]])
    assert generate.penalize(logits, [[0, 0], [1]], 2.0).tolist() == [[1.0, -1.0, 3.0], [2.0, -2.0, 3.0]]


def test_each_line_of_a_file_is_a_prompt(tmp_path: Path) -> None:
    """The guide extends its list by a line, so each character becomes a prompt."""
    (tmp_path / "prompts").write_text("first one\nsecond\n")
    assert generate.prompts_in(tmp_path / "prompts") == ["first one", "second"]
    (tmp_path / "prompts").write_text("first\n\nthird\n")
    with pytest.raises(ValueError, match="line 2 is an empty prompt"):
        generate.prompts_in(tmp_path / "prompts")


def test_a_stream_holds_back_half_a_character() -> None:
    byte_tokenizer = tokenizer.train(["plain"], 257)
    pieces = list(generate.stream(byte_tokenizer, iter(byte_tokenizer.encode("aé😀"))))
    assert pieces == ["a", "", "é", "", "", "", "😀", ""]
    assert "".join(generate.stream(byte_tokenizer, iter(byte_tokenizer.encode("é")[:1]))) == "\ufffd"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"text": "a", "lable": "b"}\n',
            r"line 1 has no text in column 'label'; it has \['lable', 'text'\]",
        ),
        ('{"text": "a", "label": ""}\n', "line 1 has no text in column 'label'"),
        ("nonsense\n", "line 1 is no JSON"),
        ("[]\n", "line 1 has no text in column 'text'; it has list"),
        ("", "has no samples"),
    ],
)
def test_samples_that_are_none(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "samples").write_text(text)
    with pytest.raises(ValueError, match=message):
        evaluate.samples_in(tmp_path / "samples", "text", "label")


def test_the_interval_of_a_share() -> None:
    """Wilson's, by the figures of its article on small counts: 0 of 10 and 5 of 10."""
    assert evaluate.wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert evaluate.wilson(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-3)
