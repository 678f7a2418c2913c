"""The checks of examples/mindspeed_llm before anything starts: each mistake is named in one line."""

from __future__ import annotations

import csv
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.waiting import captured

EXAMPLE = Path(__file__).parents[2] / "examples/mindspeed_llm"
sys.path.append(str(EXAMPLE))

import alpaca  # type: ignore[import-not-found]  # noqa: E402  programs that are started by their path
import check_weights  # type: ignore[import-not-found]  # noqa: E402
import lora  # type: ignore[import-not-found]  # noqa: E402
import mmlu  # type: ignore[import-not-found]  # noqa: E402
import model_arguments  # type: ignore[import-not-found]  # noqa: E402
import verify  # type: ignore[import-not-found]  # noqa: E402

INDEX = "model.safetensors.index.json"


def write_safetensors(path: Path, *names: str) -> None:
    """Each tensor is F32 of shape (2, 3): 24 bytes."""
    header = {
        name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [24 * n, 24 * n + 24]}
        for n, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(24 * len(names)))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of two layers in two files, with an index."""
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    names = ["model.layers.0.a.weight", "model.layers.1.a.weight"]
    for number, name in enumerate(names):
        write_safetensors(tmp_path / f"model-{number}.safetensors", name)
    write_index(tmp_path, {name: f"model-{number}.safetensors" for number, name in enumerate(names)})
    return tmp_path


def write_index(model: Path, mapped: dict[str, str], size: int = 48) -> None:
    (model / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": mapped}))


def test_a_whole_model(model: Path) -> None:
    assert check_weights.check(model) == f"{model}: 2 tensors in 2 files, 48 bytes, whole"


def truncate(model: Path) -> None:
    path = model / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def truncate_header(model: Path) -> None:
    path = model / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:40])


def point(model: Path) -> None:
    (model / "model-1.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )


def lose(model: Path) -> None:
    (model / "model-1.safetensors").unlink()


def mix(model: Path) -> None:
    write_safetensors(model / "model-1.safetensors", "model.layers.7.a.weight")


def another_size(model: Path) -> None:
    write_index(model, json.loads((model / INDEX).read_text())["weight_map"], 47)


def a_layer_less(model: Path) -> None:
    lose(model)
    write_index(model, {"model.layers.0.a.weight": "model-0.safetensors"}, 24)


def no_index(model: Path) -> None:
    (model / INDEX).unlink()


def half_index(model: Path) -> None:
    (model / INDEX).write_text((model / INDEX).read_text()[:-5])


def no_config(model: Path) -> None:
    (model / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (truncate, "model-1.safetensors is truncated: "),
        (truncate_header, "model-1.safetensors is truncated: "),
        (point, "model-1.safetensors is a Git LFS pointer of "),
        (lose, "names model-1.safetensors (1 of 2 missing): download it"),
        (mix, "model.layers.1.a.weight is in the index only"),
        (another_size, "says total_size 47, the files have 48"),
        (a_layer_less, "layer 1 has no tensor; config.json says num_hidden_layers 2"),
        (no_index, "has 2 safetensors files and no model.safetensors.index.json"),
        (half_index, "is no JSON (truncated?)"),
        (no_config, "config.json is missing"),
    ],
)
def test_a_model_that_is_not_whole(model: Path, damage: Any, line: str) -> None:
    damage(model)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as raised:
        check_weights.check(model)
    assert line in str(raised.value)


def test_alpaca_is_brought_into_the_three_columns(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [
        {"instruction": "a", "output": "b", "text": "c"},
        {"instruction": "d", "input": "e", "output": " "},
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    assert alpaca.convert(source, drop_empty=True) == ([{"instruction": "a", "input": "", "output": "b"}], 1)
    with pytest.raises(ValueError, match=r"1 of 2 outputs are empty, the first in row 2; .*--drop-empty"):
        alpaca.convert(source)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        (
            "a.json",
            '[{"prompt": "a", "response": "b"}]',
            "row 1 has prompt, response; needed are instruction, input",
        ),
        ("a.json", '[{"instruction": "a", "output": 3}]', "row 1: output is int, not text"),
        ("a.json", '[{"instruction": "a"', "is no JSON"),
        ("a.json", "{}", "has no list of rows"),
        ("a.json", "[]", "has no rows"),
        ("a.json", '[{"instruction": "a", "output": ""}]', "1 of 1 outputs are empty"),
        ("a.csv", "", "say a .parquet, .json or .jsonl file"),
    ],
)
def test_a_file_that_is_not_alpaca_is_refused(tmp_path: Path, name: str, text: str, line: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as raised:
        alpaca.convert(tmp_path / name)
    assert line in str(raised.value)


GOOD = [["What?", "1", "2", "3", "4", "A"], ["Which, then?", "1", "2", "3", "4", "D"]]


def write_mmlu(folder: Path, rows: list[list[str]], part: str = "test") -> None:
    (folder / part).mkdir(exist_ok=True)
    with (folder / part / f"anatomy_{part}.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def test_mmlu_and_its_score(tmp_path: Path) -> None:
    write_mmlu(tmp_path, GOOD)
    assert mmlu.check(tmp_path) == 2
    with pytest.raises(ValueError, match=r"dev/anatomy_dev.csv is missing"):
        mmlu.check(tmp_path, dev=True)
    write_mmlu(tmp_path, GOOD, "dev")
    template = tmp_path / "template.json"
    template.write_text('{"anatomy": ""}')
    assert mmlu.check(tmp_path, template, dev=True) == 2
    template.write_text('{"astronomy": ""}')
    with pytest.raises(ValueError, match=r"the framework has no examples of 'anatomy' and leaves it out"):
        mmlu.check(tmp_path, template)
    assert mmlu.score("INFO:x:mmlu acc = 35/100=0.35", 100) == (
        "mmlu: 35 of 100 right, 35.0 %, with 95 % confidence between 26.4 and 44.7 %"
    )
    with pytest.raises(ValueError, match="counted 100 questions, the files have 2"):
        mmlu.score("mmlu acc = 35/100=0.35", 2)
    with pytest.raises(ValueError, match="without a result"):
        mmlu.score("KeyError: 'answer'", 2)


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ([["question", "A", "B", "C", "D", "answer"], *GOOD], "row 1 is a header"),
        (
            [["question", "subject", "choices", "answer"]],
            "row 1 has 4 columns (question, subject, choices, answer)",
        ),
        ([*GOOD, ["What?", "1", "2", "3", "4", ""]], "row 3: the answer is empty"),
        ([["What?", "1", "2", "3", "4", "2"]], "row 1: the answer is '2', not A, B, C or D"),
        ([], "is empty"),
    ],
)
def test_wrong_columns(tmp_path: Path, rows: list[list[str]], line: str) -> None:
    write_mmlu(tmp_path, rows)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as raised:
        mmlu.check(tmp_path)
    assert line in str(raised.value)


def write_checkpoint(folder: Path, content: dict[str, Any]) -> None:
    rank = folder / "iter_0000008/mp_rank_00"
    rank.mkdir(parents=True, exist_ok=True)
    torch.save(content, rank / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("8")


def test_lora_that_does_not_fit(tmp_path: Path) -> None:
    base, adapter, note = tmp_path / "base", tmp_path / "lora", tmp_path / "lora/base.json"
    targets = ["linear_qkv", "linear_fc1"]
    with pytest.raises(
        ValueError, match=r"target module 'q_proj' is in no layer of Qwen3; there are linear_qkv"
    ):
        lora.check_targets(["linear_qkv", "q_proj"])
    lora.check_targets(targets)
    with pytest.raises(
        ValueError, match=r"base/latest_checkpointed_iteration.txt is missing: the checkpoint has moved"
    ):
        lora.check_base(base, note)
    write_checkpoint(base, {"model": {"a.weight": torch.zeros(2)}})
    lora.check_base(base, note)
    lora.check_base(base, note)
    base.rename(tmp_path / "moved")
    with pytest.raises(ValueError, match=r"the base of the adapter has another folder: .*base, is .*moved"):
        lora.check_base(tmp_path / "moved", note)
    write_checkpoint(base, {"model": {"a.weight": torch.ones(2)}})
    with pytest.raises(ValueError, match=r"the base of the adapter has another content"):
        lora.check_base(base, note)
    lora.check_rank(adapter, 8)  # nothing trained yet
    adapters = {"a.lora_A.default._extra_state": None, "a.lora_A.default.weight": torch.zeros(4, 2)}
    write_checkpoint(adapter, {"model": adapters})
    lora.check_rank(adapter, 4)
    with pytest.raises(ValueError, match=r"the adapter in .*lora has rank 4, LORA_R is 8"):
        lora.check_rank(adapter, 8)


def test_the_arguments_of_a_model() -> None:
    config = dict.fromkeys(model_arguments.SIZES.values(), 8) | {"model_type": "qwen3", "rope_theta": 1e6}
    arguments = model_arguments.arguments(config)
    assert arguments[arguments.index("--num-query-groups") + 1] == "8"
    assert arguments[arguments.index("--rotary-base") + 1] == "1000000"
    assert "--untie-embeddings-and-output-weights" in arguments
    assert arguments[:-1] == model_arguments.arguments({**config, "tie_word_embeddings": True})
    with pytest.raises(ValueError, match="model_type is 'llama'; this flow is written for 'qwen3'"):
        model_arguments.arguments({**config, "model_type": "llama"})


def test_checkpoints_are_compared_bit_for_bit(tmp_path: Path) -> None:
    zeros = {"model": {"a": torch.zeros(2)}, "args": "one"}
    write_checkpoint(tmp_path / "one", zeros)
    write_checkpoint(tmp_path / "same", {**zeros, "args": "other"})
    write_checkpoint(tmp_path / "other", {"model": {"a": torch.tensor([0.0, -0.0])}})
    assert "1 tensors, bit for bit" in verify.same_checkpoints(tmp_path / "one", tmp_path / "same")
    with pytest.raises(verify.DifferentError, match="/model/a is different"):
        verify.same_checkpoints(tmp_path / "one", tmp_path / "other")


@pytest.fixture
def flow(tmp_path: Path) -> Any:
    """Run flow.sh without a framework; python, ttprun and torchrun record their arguments."""
    tree = tmp_path / "framework"
    (tree / "megatron").mkdir(parents=True)
    (tree / "pretrain_gpt.py").touch()
    calls = tmp_path / "calls"
    commands = {
        "python": "echo --num-layers 2",
        "torchrun": "echo MindSpeed-LLM:; echo text",
        "ttprun": "exit ${ENDS:-0}",
    }
    for name, line in commands.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\necho {name} "$@" >> {calls}\n{line}\n')
        path.chmod(0o755)

    def run(*arguments: str, **variables: str) -> tuple[int, str, list[str]]:
        environ = {
            "MINDSPEED_LLM": str(tree),
            "OUT": str(tmp_path / "out"),
            "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        }
        calls.write_text("")
        command = ["bash", str(EXAMPLE / "flow.sh"), *arguments]
        completed = captured(command, env={**environ, "KILL": "", **variables}, cwd=tmp_path)
        trained = [line for line in calls.read_text().splitlines() if not line.startswith("python")]
        return completed.returncode, completed.stdout + completed.stderr, trained

    return run


def test_a_step_that_is_done_is_not_done_again(flow: Any, tmp_path: Path) -> None:
    (tmp_path / "out/given").mkdir(parents=True)
    (tmp_path / "out/given/corpus.json").touch()
    code, output, calls = flow("--tiny", ENDS="7")
    assert code == 2, output
    assert output.splitlines()[-1].startswith("flow.sh: error: pretrain: exit code 7; all of it: ")
    assert [call.split()[0] for call in calls] == ["ttprun"]
    assert f"--load {tmp_path}/out/converted --finetune --save {tmp_path}/out/pretrain" in calls[0]

    saved = tmp_path / "out/pretrain/latest_checkpointed_iteration.txt"
    saved.parent.mkdir()
    saved.write_text("3")
    code, output, calls = flow("--tiny", VERIFY="")
    assert code == 0, output
    assert "convert: done before" in output
    assert [call.split()[0] for call in calls] == ["ttprun"] * 3 + ["torchrun"] * 3
    assert f"--load {tmp_path}/out/pretrain --save {tmp_path}/out/pretrain" in calls[0]
    assert f"--load {tmp_path}/out/tune --finetune --save {tmp_path}/out/lora" in calls[2]

    assert flow("--tiny", VERIFY="")[2] == []
    resumed = flow("--tiny", "--from", "chat", VERIFY="")[2]
    assert ["--task chat" in call for call in resumed] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "environ", "line"),
    [
        (("--from", "tuning"), {}, "--from tuning: usage: flow.sh [--tiny] [--from STEP]"),
        (("--from",), {}, "--from says no step"),
        (("--tniy",), {}, "--tniy: usage"),
        (
            ("--tiny",),
            {"MINDSPEED_LLM": "/nowhere"},
            "MINDSPEED_LLM is '/nowhere', not a folder of MindSpeed-LLM",
        ),
        (("--tiny",), {"DEVICE": "gpu"}, "DEVICE is gpu: say npu or cpu"),
    ],
)
def test_a_wrong_start_of_the_flow(
    flow: Any, arguments: tuple[str, ...], environ: dict[str, str], line: str
) -> None:
    code, output, calls = flow(*arguments, **environ)
    assert (code, calls) == (2, [])
    assert output.startswith("flow.sh: error: ")
    assert line in output
    assert output.count("\n") == 1
