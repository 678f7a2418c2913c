"""`python -m adaptor transform`: each part reaches its rank; an impossible target is refused in one line."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from adaptor.checkpoint import disk, hashing, manifest, tracker
from adaptor.checkpoint.hashing import HashingFile
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.transform import archive, copying, rules, run, writing
from adaptor.transform.copying import Files
from adaptor.transform.records import NewTensor, StoredTensor
from adaptor.transform.sizes import Sizes
from adaptor.transform.source import open_source
from adaptor.transform.target import TargetCheckpoint
from tests.unit import small_checkpoint
from tests.unit.launching import HEARS_CTRL_C
from tests.unit.small_checkpoint import FFN, STEP, transform

STEP_FOLDER = naming.final_name(STEP)


def _model(root: Path, folder: str) -> Any:
    return torch.load(root / STEP_FOLDER / folder / naming.MODEL_FILE, weights_only=False)["model"]


@pytest.mark.parametrize(
    "sizes", ["--tp 2", "--tp 3", "--pp 4", "--tp 2 --pp 2", "--pp 2 --vpp 2", "--tp 6 --pp 4"]
)
def test_there_and_back(tmp_path: Path, sizes: str) -> None:
    small_checkpoint.write(tmp_path / "a")
    assert transform(tmp_path / "a", tmp_path / "b", *sizes.split()) == 0
    assert transform(tmp_path / "b", tmp_path / "c", "--tp", "1", "--pp", "1", "--dp", "1") == 0
    assert small_checkpoint.contents(tmp_path / "c") == small_checkpoint.contents(tmp_path / "a")
    assert manifest.defects(tmp_path / "b" / STEP_FOLDER) == []
    assert tracker.tracked_step(tmp_path / "b") == STEP


def test_from_two_to_three(tmp_path: Path) -> None:
    """Neither size is a multiple of the other."""
    small_checkpoint.write(tmp_path / "a")
    assert transform(tmp_path / "a", tmp_path / "two", "--tp", "2") == 0
    assert transform(tmp_path / "two", tmp_path / "three", "--tp", "3") == 0
    assert transform(tmp_path / "a", tmp_path / "directly", "--tp", "3") == 0
    assert small_checkpoint.contents(tmp_path / "three") == small_checkpoint.contents(tmp_path / "directly")


def test_buckets_of_overlapped_gradients(tmp_path: Path) -> None:
    """The parameters fill the buffer up to the next multiple of 64 where buckets end."""
    params = [("a", 10, False), ("b", 100, False), ("c", 30, False)]
    placed, numel = rules.place(params, bucket=90)
    assert [(part.name, part.begin, part.end) for part in placed] == [
        ("c", 0, 30),
        ("b", 64, 164),
        ("a", 164, 174),
    ]
    assert numel == 174
    assert [part.begin for part in rules.place(params, bucket=None)[0]] == [0, 64, 192]


def test_each_rank_gets_its_part(tmp_path: Path) -> None:
    source = small_checkpoint.write(tmp_path / "a")
    assert transform(tmp_path / "a", tmp_path / "b", "--tp", "2") == 0
    name = "decoder.layers.1.mlp.linear_fc1.weight"
    gate, up = source[name][:FFN], source[name][FFN:]
    second = _model(tmp_path / "b", "mp_rank_01")
    assert torch.equal(second[name], torch.cat([gate[FFN // 2 :], up[FFN // 2 :]]))
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    assert torch.equal(second[name], source[name][:, FFN // 2 :])
    name = "embedding.word_embeddings.weight"
    assert torch.equal(second[name], torch.cat([source[name][12:], source[name][-1:].expand(4, -1)]))
    state = torch.load(
        tmp_path / "b" / STEP_FOLDER / "mp_rank_01" / naming.OPTIMIZER_FILE, weights_only=False
    )
    (buffer,) = state[0].values()
    assert not buffer["exp_avg"][-4 * 12 :].any(), "new rows have zero moments"
    assert buffer["exp_avg"][-12 * 12 : -4 * 12].all()


@pytest.mark.parametrize("seed", [0, 1, 1 << 32, (1 << 61) + 3])
def test_the_state_of_a_cpu_generator_is_that_of_torch(seed: int) -> None:
    like = StoredTensor(Path(), 0, "uint8", (torch.get_rng_state().numel(),))
    generated = copying.generator(like, seed)
    expected = torch.Generator().manual_seed(seed).get_state()
    assert b"".join(map(bytes, generated.pieces())) == expected.numpy().tobytes()


def test_random_states_of_new_ranks_are_loaded_by_torch(tmp_path: Path) -> None:
    small_checkpoint.write(tmp_path / "a", rng_state=True)
    assert transform(tmp_path / "a", tmp_path / "b", "--tp", "2", "--pp", "2") == 0
    saved = {
        folder: torch.load(tmp_path / "b" / STEP_FOLDER / folder / naming.MODEL_FILE, weights_only=False)
        for folder in ("mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001")
    }
    drawn = set()
    for body in saved.values():
        (states,) = body["rng_state"]
        draw = torch.Generator()
        draw.set_state(states["torch_rng_state"])
        numpy_draw = numpy.random.RandomState()
        numpy_draw.set_state(states["np_rng_state"])
        drawn.add((torch.rand(1, generator=draw).item(), numpy_draw.random()))
        assert states["rng_tracker_states"]["model-parallel-rng"].numel() == 16
    assert len(drawn) == 2, "stages draw different numbers, tensor ranks of a stage the same"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_that_of_torch(dtype: torch.dtype) -> None:
    """For random bits, ties between two neighbours, infinities and NaN."""
    bits = torch.randint(-(1 << 31), 1 << 31, (100_000,), generator=torch.Generator().manual_seed(1))
    halves = (torch.arange(0, 1 << 16) << 16) + (1 << 15)
    main = torch.cat([bits, halves]).to(torch.int32).view(torch.float32)
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65519.99, 65520, 1e-8]
    main = torch.cat([main, torch.tensor(special)])
    weight = main.to(dtype)
    dtype_name = str(dtype).removeprefix("torch.")
    assert copying.rounds_to(_bytes(main), _bytes(weight), dtype_name)
    for place in (0, 5, 99_999):
        rounded_wrong = weight.clone()
        rounded_wrong[place] = 1.0 if weight[place] != 1.0 else 2.0
        assert not copying.rounds_to(_bytes(main), _bytes(rounded_wrong), dtype_name)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("limit", [None, 1000], ids=["", "as if larger than 2 GiB"])
def test_a_written_file_is_an_archive_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    content = numpy.arange(5000, dtype=numpy.float32)
    if limit is not None:
        monkeypatch.setattr(zipfile, "ZIP64_LIMIT", limit)
    value = {
        "whole": NewTensor("float32", (50, 100), lambda: [content[:2].tobytes(), content[2:].tobytes()]),
        "none": NewTensor("float32", (0,), list),
        "one": NewTensor("bfloat16", (), lambda: [b"\x80\x3f"]),
    }
    with HashingFile(tmp_path / "x.pt") as stream, Files() as files:
        writing.save(value, stream, "x", files)
    monkeypatch.undo()
    entry = stream.entry("x.pt")
    assert entry.bytes == (tmp_path / "x.pt").stat().st_size
    assert entry.xxh3_128 == hashing.hash_file(tmp_path / "x.pt")
    for options in ({}, {"mmap": True}, {"weights_only": False}):
        loaded = torch.load(tmp_path / "x.pt", **options)
        assert torch.equal(loaded["whole"], torch.arange(5000.0).view(50, 100))
        assert loaded["none"].shape == (0,)
        assert loaded["one"].item() == 1
    read = archive.read(tmp_path / "x.pt")
    assert read["whole"].offset % 64 == 0
    with zipfile.ZipFile(tmp_path / "x.pt") as opened:
        assert opened.testzip() is None


@pytest.mark.parametrize(
    ("tp", "ep", "etp"), [(1, 1, None), (3, 2, None), (2, 2, 1), (2, 4, 1), (4, 2, 2), (4, 8, 2), (6, 4, 3)]
)
def test_each_part_of_a_model_has_a_folder(tp: int, ep: int, etp: int | None) -> None:
    """Folders number the ranks of a stage: by tensor rank for dense parts and by expert rank for experts."""
    sizes = Sizes(tp=tp, ep=ep, etp=etp)
    assert sizes.lack == ""
    ranks = sizes.ranks
    assert len({sizes.folder(rank) for rank in ranks}) == len(ranks)
    folders = [(sizes.replica(rank) * tp + rank.tp, sizes.expert_rank(rank)) for rank in ranks]
    assert folders == [(number, number % (etp or tp)) for number in range((etp or tp) * ep)]


def _with(name: str, value: Any) -> Callable[[Any], None]:
    return lambda body: setattr(body["args"], name, value)


def _uneven_experts(body: Any) -> None:
    body["args"].num_experts, body["args"].expert_tensor_parallel_size = 4, 3


def _other_step(body: Any) -> None:
    body["iteration"] = 6


def _other_norm(body: Any) -> None:
    body["model"]["decoder.layers.0.input_layernorm.weight"] += 1


def _other_group(body: Any) -> None:
    body["optimizer"]["optimizer"]["param_groups"][0]["step"] = 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tp 4", "--tp 4: 6 attention heads are not divisible by 4"),
        ("--pp 3", "--pp 3: 4 layers are not divisible by 3"),
        ("--pp 2 --vpp 4", "--pp 2 --vpp 4: 4 layers are not divisible by 8"),
        ("--vpp 2", "--vpp 2: needs --pp of at least 2"),
        ("--ep 2", "--ep 2: the model has no experts"),
        ("--tp 2 --etp 1", "--etp 1: the model has no experts"),
        ("--etp 0", "--etp is 0: it must be a number from 1 on"),
        ("--tp 0", "--tp is 0: it must be a number from 1 on"),
        ("--step -1", "--step is -1: it must be a number from 0 on"),
        ("--tp 2 --rank=", "--rank is '': it must be like tp=1,pp=0"),
        ("--tp 2 --needs=", "--needs is '': it must be like tp=1,pp=0"),
        ("--tp 2 --rank tp=1,tp=0", "--rank is 'tp=1,tp=0': it must be like tp=1,pp=0"),
        ("--tp 2 --step 9", "iter_0000009: there is no such checkpoint"),
        (
            "--tp 2 --vocab-size 3",
            "--vocab-size 3: padded for TP1 it would have 4 rows; the checkpoint has 20",
        ),
        ("--tp 2 --needs tp=2", "--needs is tp=2: the target has TP2 PP1, so there is no such rank"),
    ],
)
def test_refused_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    small_checkpoint.write(tmp_path / "a")
    assert transform(tmp_path / "a", tmp_path / "b", *options.split()) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_with("fp8", "e4m3"), "--fp8-format, which is not transformed"),
        (_with("use_torch_fsdp2", True), "--use-torch-fsdp2, which is not transformed"),
        (_with("swiglu", False), "MLPs with another gate are not transformed"),
        (_with("num_experts", 4), "experts with an expert-parallel size of 1"),
        (_uneven_experts, "expert-tensor-parallel size 3 with TP2 and EP1, where the framework's folders"),
        (_with("vocab_size", 20), "or one more for the end of a document; give the tokenizer's size"),
        (_with("use_distributed_optimizer", False), "without --use-distributed-optimizer"),
        (_with("optimizer", "sgd"), "--optimizer sgd, which is not"),
        (_other_step, "is not of step 7, but of step 6"),
        (_other_norm, "input_layernorm.weight: its weight differs on rank tp=0,pp=0,ep=0 and rank tp=1"),
        (_other_group, "step or the loss scale differ on rank tp=0,pp=0,ep=0 and rank tp=1"),
    ],
)
def test_refused_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: Callable[[Any], None], message: str
) -> None:
    small_checkpoint.write(tmp_path / "a")
    assert transform(tmp_path / "a", tmp_path / "b", "--tp", "2") == 0
    ranks = (
        ("mp_rank_01",) if edit in (_other_step, _other_norm, _other_group) else ("mp_rank_00", "mp_rank_01")
    )
    for rank in ranks:
        small_checkpoint.change(tmp_path / "b" / STEP_FOLDER / rank / naming.MODEL_FILE, edit)
    assert transform(tmp_path / "b", tmp_path / "c", "--tp", "1") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "c" / STEP_FOLDER).exists()


def test_a_rank_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_checkpoint.write(tmp_path / "a")
    assert transform(tmp_path / "a", tmp_path / "b", "--tp", "2") == 0
    (tmp_path / "b" / STEP_FOLDER / "mp_rank_01" / naming.MODEL_FILE).unlink()
    assert transform(tmp_path / "b", tmp_path / "c", "--tp", "1") == 2
    assert "mp_rank_01/model_optim_rng.pt: missing" in capsys.readouterr().err


def test_a_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --verify the manifest shows a changed byte; without, the weights do not fit the main params."""
    small_checkpoint.write(tmp_path / "a")
    assert transform(tmp_path / "a", tmp_path / "b", "--tp", "2") == 0
    file = tmp_path / "b" / STEP_FOLDER / "mp_rank_01" / naming.MODEL_FILE
    stored = archive.read(file)["model"]["decoder.layers.2.mlp.linear_fc2.weight"]
    content = bytearray(file.read_bytes())
    content[stored.offset] ^= 1
    file.write_bytes(content)
    assert transform(tmp_path / "b", tmp_path / "c", "--tp", "1", "--verify") == 2
    assert "checksum differs from the manifest" in capsys.readouterr().err
    assert transform(tmp_path / "b", tmp_path / "d", "--tp", "1") == 2
    assert "decoder.layers.2.mlp.linear_fc2.weight: the main params" in capsys.readouterr().err
    os.truncate(file, len(content) - 8)
    assert transform(tmp_path / "b", tmp_path / "e", "--tp", "1") == 2
    assert str(file) in capsys.readouterr().err


def test_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_checkpoint.write(tmp_path / "a")
    assert transform(tmp_path / "a", tmp_path / "a" / "b", "--tp", "2") == 2
    assert "is inside SRC" in capsys.readouterr().err
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.pdf").touch()
    assert transform(tmp_path / "a", tmp_path / "b", "--tp", "2") == 2
    assert "is not empty, it has thesis.pdf" in capsys.readouterr().err
    assert transform(tmp_path / "nowhere", tmp_path / "c", "--tp", "2") == 2
    assert "there is no such folder" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match=r"the transform needs 1152921504\.607 GB"):
        disk.require_room(tmp_path, 1 << 60, run.NEED)


def test_classes_that_are_not_allowed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "made"),)

    torch.save({"args": Evil()}, tmp_path / "file.pt", pickle_module=pickle)
    with pytest.raises(CheckpointError, match=r"has an object of posix\.mkdir; not read"):
        archive.read(tmp_path / "file.pt")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "attack",
    [
        b"\x80\x02cmegatron.core.enums\nModelType\n}X\x0a\x00\x00\x00__module__X\x02\x00\x00\x00osssb.",
        b"\x80\x04\x8c\x13megatron.core.enums\x8c\x0eModelType\n0cos\n\x93.",
    ],
)
def test_a_file_cannot_rename_a_written_class(tmp_path: Path, attack: bytes) -> None:
    """A framework's class rewritten under another name would run when DST is loaded."""
    torch.save({}, tmp_path / "file.pt")
    with zipfile.ZipFile(tmp_path / "file.pt") as zip_file:
        members = {name: zip_file.read(name) for name in zip_file.namelist()}
    with zipfile.ZipFile(tmp_path / "file.pt", "w", zipfile.ZIP_STORED) as zip_target:
        for name, content in members.items():
            zip_target.writestr(name, attack if name.endswith("data.pkl") else content)
    with pytest.raises(CheckpointError):
        archive.read(tmp_path / "file.pt")


def test_a_dry_run_reads_no_tensor_and_imports_neither_numpy_nor_torch(tmp_path: Path) -> None:
    small_checkpoint.write(tmp_path / "a")
    code = (
        "import sys; from adaptor.__main__ import main; code = main(sys.argv[1:]);"
        " print({'numpy', 'torch'} & sys.modules.keys()); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "transform", str(tmp_path / "a"), str(tmp_path / "b"), "--tp", "2"]
    dry = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, check=True)
    assert "step 7: TP1 PP1 to TP2 PP1, 2 of 2 ranks" in dry.stdout
    assert dry.stdout.endswith("set()\n")
    assert not (tmp_path / "b").exists()


def test_the_files_that_a_rank_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_checkpoint.write(tmp_path / "a")
    assert transform(tmp_path / "a", tmp_path / "b", "--pp", "4") == 0
    capsys.readouterr()
    assert transform(tmp_path / "b", tmp_path / "c", "--pp", "2", "--needs", "tp=0,pp=1") == 0
    expected_files = [
        f"mp_rank_00_00{stage}/{name}"
        for stage in (0, 2, 3)
        for name in (naming.OPTIMIZER_FILE, naming.MODEL_FILE)
    ]
    assert capsys.readouterr().out.split() == expected_files, "the embedding is on the first stage, too"


def test_one_rank_then_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_checkpoint.write(tmp_path / "a")
    assert transform(tmp_path / "a", tmp_path / "b", "--tp", "2", "--rank", "tp=1") == 0
    folder = run.temporary_folder(tmp_path / "b", STEP)
    (written,) = folder.rglob(naming.MODEL_FILE)
    number = written.stat().st_ino
    assert transform(tmp_path / "a", tmp_path / "b", "--tp", "2") == 2
    assert "go on with --resume" in capsys.readouterr().err
    assert transform(tmp_path / "a", tmp_path / "b", "--tp", "2", "--resume") == 0
    final = tmp_path / "b" / STEP_FOLDER
    assert (final / "mp_rank_01" / naming.MODEL_FILE).stat().st_ino == number, "it is not written again"
    assert manifest.defects(final) == []
    assert {path.name for path in final.iterdir()} == {"mp_rank_00", "mp_rank_01", naming.MANIFEST}


def test_a_source_removed_during_the_transform_is_one_line(tmp_path: Path) -> None:
    small_checkpoint.write(tmp_path / "a")
    target = TargetCheckpoint(open_source(tmp_path / "a", None), Sizes(tp=2), 24)
    folder = run.temporary_folder(tmp_path / "b", STEP)
    folder.mkdir(parents=True)
    order = run.TransformOrder(tmp_path / "a", STEP, target.sizes, target.rows, folder, "torch")
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"distrib_optim.pt: No such file or directory"):
        run.run(target, order, target.sizes.ranks, 2, lambda line: None)


def test_a_disk_that_is_too_small_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small_checkpoint.write(tmp_path / "a")
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert transform(tmp_path / "a", tmp_path / "b" / "c", "--tp", "2") == 2
    assert "0.000 GB are free, the transform needs 0.00" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_several_workers(tmp_path: Path) -> None:
    small_checkpoint.write(tmp_path / "a")
    assert transform(tmp_path / "a", tmp_path / "one", "--tp", "2") == 0
    assert transform(tmp_path / "a", tmp_path / "two", "--tp", "2", "--workers", "2") == 0
    assert small_checkpoint.contents(tmp_path / "two") == small_checkpoint.contents(tmp_path / "one")


def test_ctrl_c_is_one_line_and_resume_goes_on(tmp_path: Path) -> None:
    """The signal goes to all processes of the terminal."""
    small_checkpoint.write(tmp_path / "a")
    code = f"{HEARS_CTRL_C}; import sys; from adaptor.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-u", "-c", code, "transform", str(tmp_path / "a"), str(tmp_path / "b")]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    while True:
        with subprocess.Popen([*command, "--tp", "2"], start_new_session=True, **pipes) as running:
            assert running.stdout is not None
            assert running.stdout.readline().startswith("step 7")
            os.killpg(running.pid, signal.SIGINT)
            _, stderr = running.communicate()
        if tracker.tracked_step(tmp_path / "b") is None:
            break
        # The worker had finished before the signal, which may kill the interpreter at its exit.
        assert running.returncode in (0, 130, -signal.SIGINT)
        shutil.rmtree(tmp_path / "b")
    assert running.returncode == 130
    assert stderr.splitlines()[-1] == (
        "python -m adaptor transform: interrupted; the same command with --resume goes on"
    )
    assert "Traceback" not in stderr
    subprocess.run([*command, "--tp", "2", "--resume"], check=True, capture_output=True)
    assert manifest.defects(tmp_path / "b" / STEP_FOLDER) == []
