"""Traces and dumps of chosen steps: the files, and training that is unchanged by them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptor import config, context, output
from adaptor.diagnostics import requests
from adaptor.diagnostics.recorder import Recorder
from adaptor.diagnostics.recordings import statistics
from adaptor.errors import ConfigError

STEPS = 4


class Block(torch.nn.Module):
    """A layer like Megatron's: two tensors in a tuple, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.dropout(self.linear(hidden), 0.1) + hidden, None


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden, _ = layer(hidden)
        return hidden


@pytest.fixture(autouse=True)
def own_context() -> Iterator[None]:
    yield
    context.forget()


def _recorder(tmp_path: Path, **settings: str) -> Recorder:
    process_context = context.begin({"TTP_LOG_PATH": str(tmp_path / "logs"), **settings})
    return process_context.part(Recorder)


def _train(recorder: Recorder, spoil: int = 0) -> tuple[list[float], Model]:
    """Train with step `spoil` on non-finite input; return the losses and the model."""
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder.watch([model])
    losses = []
    for step in range(1, STEPS + 1):
        recorder.begin_step(step)
        inputs = torch.randn(4, 8)
        if step == spoil:
            inputs[0, 0] = torch.nan
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        recorder.before_update()
        optimizer.step()
        recorder.end_step()
        losses.append(loss.item())
    recorder.close()
    assert output.drain(60)
    return losses, model


def _dump_file(tmp_path: Path, **keys: object) -> str:
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(keys))
    return str(path)


def _lines(tmp_path: Path) -> list[dict[str, Any]]:
    (path,) = (tmp_path / "logs").rglob("dump-rank0.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _hooks(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._backward_hooks) for module in model.modules())


def test_losses_are_bitwise_unchanged(tmp_path: Path) -> None:
    plain, _ = _train(_recorder(tmp_path))
    settings = {"TTP_PROFILE": "steps=2-3", "TTP_DUMP": _dump_file(tmp_path, steps="1-3", tensors=True)}
    assert _train(_recorder(tmp_path, **settings))[0] == plain
    assert len(list((tmp_path / "logs").rglob("trace.json"))) == 1


def test_without_a_request_nothing_is_hooked_and_nothing_written(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path)
    _, model = _train(recorder)
    recorder.begin_step(STEPS + 1)
    assert _hooks(model) == 0
    assert not (tmp_path / "logs").exists()


def test_hooks_exist_only_in_the_requested_steps(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path, TTP_DUMP=_dump_file(tmp_path, steps=2))
    model = Model()
    recorder.watch([model])
    recorder.begin_step(1)
    assert _hooks(model) == 0
    recorder.begin_step(2)
    assert _hooks(model) == len(list(model.modules()))
    recorder.end_step()
    assert _hooks(model) == 0
    recorder.close()


def test_other_ranks_record_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    settings = {"TTP_PROFILE": "steps=2,ranks=0", "TTP_DUMP": _dump_file(tmp_path, steps=2)}
    _train(_recorder(tmp_path, **settings))
    assert not (tmp_path / "logs").exists()


def test_a_dump_has_what_modules_compute_and_the_gradients(tmp_path: Path) -> None:
    recorder = _recorder(tmp_path, TTP_DUMP=_dump_file(tmp_path, steps=[2], modules=["layers.0*", ""]))
    _train(recorder)
    lines = _lines(tmp_path)
    assert {line["step"] for line in lines} == {2}
    assert [(line["kind"], line["name"], line.get("tensor")) for line in lines] == [
        ("forward", "layers.0.linear", "output"),
        ("forward", "layers.0", "output.0"),
        ("forward", "", "output"),
        ("backward", "", "output"),
        ("backward", "layers.0", "output.0"),
        ("backward", "layers.0.linear", "output"),
        ("gradient", "layers.0.linear.weight", None),
        ("gradient", "layers.0.linear.bias", None),
    ]
    assert lines[0]["shape"] == [4, 8]
    assert lines[0]["dtype"] == "float32"
    assert lines[0]["nan"] == lines[0]["inf"] == 0


def test_the_first_value_that_is_not_finite_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _train(_recorder(tmp_path, TTP_DUMP=_dump_file(tmp_path, steps="1-4", stats=["nan"])), spoil=3)
    lines = [line for line in capfd.readouterr().err.splitlines() if "not finite" in line]
    assert lines[0] == (
        "[ttp] TTP_DUMP: step 3, rank 0: the first tensor that is not finite is of forward, layers.0.linear"
        " (8 NaN, 0 inf)"
    )
    first = next(line for line in _lines(tmp_path) if line["nan"])
    assert (first["step"], first["name"]) == (3, "layers.0.linear")
    assert "mean" not in first


def test_tensors_are_written_as_they_were(tmp_path: Path) -> None:
    names = ["layers.1.linear.weight"]
    recorder = _recorder(tmp_path, TTP_DUMP=_dump_file(tmp_path, steps=STEPS, modules=names, tensors=True))
    _, model = _train(recorder)
    (line,) = _lines(tmp_path)
    (path,) = (tmp_path / "logs").rglob(line["file"])
    gradient = model.get_parameter(names[0]).grad
    assert gradient is not None
    assert torch.equal(torch.load(path), gradient)


def test_the_limit_is_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(1, 300_000)
    recorder = _recorder(tmp_path, TTP_DUMP=_dump_file(tmp_path, steps="1-9", tensors=True, limit=1))
    recorder.watch([model])
    for step in (1, 2):
        recorder.begin_step(step)
        model(torch.ones(1, 1))
        recorder.end_step()
    recorder.close()
    assert output.drain(60)
    assert "has written 1 MiB, its limit, in step 1, and writes no more" in capfd.readouterr().err
    assert not list(tmp_path.rglob("*.pt"))


def test_statistics_are_those_of_the_finite_elements() -> None:
    computed = statistics(torch.tensor([3.0, -4.0, torch.nan, torch.inf, -torch.inf]))
    assert computed == {"min": -4.0, "max": 3.0, "mean": -0.5, "norm": 5.0, "nan": 1, "inf": 2}
    none = {"min": None, "max": None, "mean": None, "norm": None}
    assert statistics(torch.tensor([torch.nan])) == {**none, "nan": 1, "inf": 0}
    assert statistics(torch.empty(0, 3)) == {**none, "nan": 0, "inf": 0}
    half = statistics(torch.full((2, 2), 60_000.0, dtype=torch.float16))
    assert half["norm"] == 120_000.0
    assert all(value is None or math.isfinite(value) for value in half.values())


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("TTP_PROFILE", "the trace of rank 0 is lost: NotADirectoryError"),
        ("TTP_DUMP", "rank 0 writes no more: NotADirectoryError"),
    ],
)
def test_a_failed_write_does_not_stop_training(
    place: str, line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line reports the failure, and no line names a file."""
    settings = {"TTP_PROFILE": "steps=2", "TTP_DUMP": _dump_file(tmp_path, steps="2-3")}
    plain, _ = _train(_recorder(tmp_path))
    recorder = _recorder(tmp_path, **{place: settings[place]})
    (tmp_path / "logs").touch()  # no folder can be made below a file
    assert _train(recorder)[0] == plain
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith(f"[ttp] {place}: ")]
    assert [line.partition(": [Errno")[0] for line in lines] == [f"[ttp] {place}: {line}"]
    assert (tmp_path / "logs").is_file()


def test_an_active_profiler_of_the_script_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with torch.profiler.profile() as profiler:
        _train(_recorder(tmp_path, TTP_PROFILE="steps=2"))
    assert "[ttp] TTP_PROFILE: rank 0 records no more: " in capfd.readouterr().err
    assert any("linear" in event.key for event in profiler.key_averages())


def _asked_for(place: str, tmp_path: Path, steps: str) -> dict[str, str]:
    return {place: f"steps={steps}" if place == "TTP_PROFILE" else _dump_file(tmp_path, steps=steps)}


@pytest.mark.parametrize("place", ["TTP_PROFILE", "TTP_DUMP"])
def test_requested_steps_that_never_come_are_reported(
    place: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _train(_recorder(tmp_path, **_asked_for(place, tmp_path, "100-102")))
    assert capfd.readouterr().err == (
        f"[ttp] {place}: rank 0 has trained none of the steps 100-102, so nothing is recorded\n"
    )


@pytest.mark.parametrize("place", ["TTP_PROFILE", "TTP_DUMP"])
def test_a_model_replaced_before_the_first_step_is_not_reported(
    place: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder = _recorder(tmp_path, **_asked_for(place, tmp_path, "2"))
    recorder.watch([Model()])
    _train(recorder)
    assert "none of the steps" not in capfd.readouterr().err


def test_the_line_about_a_dump_names_its_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _train(_recorder(tmp_path, TTP_DUMP=_dump_file(tmp_path, steps=2, modules=["layers.0"])))
    (path,) = (tmp_path / "logs").rglob("dump-rank0.jsonl")
    assert capfd.readouterr().err == f"[ttp] TTP_DUMP: 2 tensors of rank 0 are in {path}\n"
    assert len(_lines(tmp_path)) == 2


def test_a_dump_without_a_writer_thread_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = _recorder(tmp_path, TTP_DUMP=_dump_file(tmp_path, steps="2-3"))
    start = output.Writer.start
    monkeypatch.setattr(
        output.Writer, "start", lambda writer: writer is not recorder._writer and start(writer)
    )
    _train(recorder)
    assert capfd.readouterr().err == (
        "[ttp] TTP_DUMP: rank 0 writes no more: no thread can be started that writes\n"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("10", "it must be like steps=10-12,ranks=0"),
        ("ranks=0", "steps are missing, as in steps=10-12,ranks=0"),
        ("steps=10-12,rank=0", "it has no 'rank', only steps and ranks"),
        ("steps=1,steps=2", "it has steps twice"),
        ("steps=12-10", "the range 12-10 ends before it begins"),
        ("steps=x", "'x' is no number and no range like 10-12"),
        ("steps=0-3", "steps begin at 1"),
        ("steps=1,5", "steps must be one number or one range: a trace has steps that follow each other"),
        ("steps=1,ranks=", "'' is no number and no range like 10-12"),
    ],
)
def test_an_invalid_profile_is_one_line(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load({"TTP_PROFILE": text})
    assert str(caught.value) == f"TTP_PROFILE is {text!r}: {reason}"


def test_a_profile_is_read() -> None:
    request = requests.profile("steps=10-12,ranks=0,8-9")
    assert request is not None
    assert [n for n in range(20) if n in request.steps] == [10, 11, 12]
    assert [n for n in range(20) if n in request.ranks] == [0, 8, 9]
    assert requests.profile("") is requests.dump("") is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Input data was truncated"),
        ("[]", "Expected `object`, got `array`"),
        ('{"stpes": 1}', "Object contains unknown field `stpes`"),
        ("{}", "Object missing required field `steps`"),
        ('{"steps": true}', "Expected `int | str | array`, got `bool` - at `$.steps`"),
        ('{"steps": [0]}', "steps begin at 1"),
        ('{"steps": 1, "modules": "a"}', "Expected `array`, got `str` - at `$.modules`"),
        ('{"steps": 1, "stats": ["mode"]}', "Invalid enum value 'mode' - at `$.stats[0]`"),
        ('{"steps": 1, "tensors": 1}', "Expected `bool`, got `int` - at `$.tensors`"),
        ('{"steps": 1, "tensors": true, "stats": ["nan"]}', 'it has "stats" and "tensors": leave out one'),
        ('{"steps": 1, "limit": 0}', "Expected `int` >= 1 - at `$.limit`"),
        ("é".encode("latin-1"), "the file is no text"),
        (b"{" + b" " * (1 << 16), "the file has more than 65536 bytes"),
    ],
)
def test_an_invalid_dump_request_is_one_line(content: str | bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError) as caught:
        config.load({"TTP_DUMP": str(path)})
    line = str(caught.value)
    assert line.startswith("TTP_DUMP is ")
    assert reason in line
    assert len(line.splitlines()) == 1


def test_a_dump_file_that_is_not_there(tmp_path: Path) -> None:
    for path, reason in (
        ("gone.json", "the file cannot be read (No such file or directory)"),
        (".", "no file"),
    ):
        with pytest.raises(ConfigError, match=reason.replace("(", r"\(").replace(")", r"\)")):
            config.load({"TTP_DUMP": str(tmp_path / path)})


def test_workers_are_given_the_content_of_the_file(tmp_path: Path) -> None:
    path = _dump_file(tmp_path, steps="3-4", ranks=[0, 2])
    text = requests.inline(path)
    assert requests.dump(text) == requests.dump(path)
    assert requests.inline(text) == text


def test_ranks_that_the_job_does_not_have_are_refused() -> None:
    context.begin({"TTP_PROFILE": "steps=1,ranks=0-2"})
    with pytest.raises(ConfigError, match=r"TTP_PROFILE has the ranks 0-2: this job has the ranks 0 to 1"):
        context.part(Recorder).require_other_loop(2)


@pytest.mark.parametrize("name", ["profile", "use_pytorch_profiler"])
def test_a_second_profiler_is_refused(name: str) -> None:
    parsed = SimpleNamespace(**{name: True})
    context.begin({})
    context.part(Recorder).require_other_loop(2, parsed)
    context.begin({"TTP_PROFILE": "steps=1"})
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} is given, and TTP_PROFILE is set: two profilers cannot"):
        context.part(Recorder).require_other_loop(2, parsed)
