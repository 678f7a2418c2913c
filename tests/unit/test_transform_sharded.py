"""`python -m adaptor transform` from and to the format `torch_dist`: small checkpoints, no framework.

`tests/integration/test_transform.py` shows that Megatron-LM writes and loads such files.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from adaptor.checkpoint import dcp, layout_file, manifest, tracker
from adaptor.protocol import naming
from tests.unit import small_checkpoint
from tests.unit.small_checkpoint import FFN, STEP, error_line, transform
from tests.unit.test_integrity import framework_checks

STEP_FOLDER = naming.final_name(STEP)
SHARDED = ("--format", "torch_dist")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint of the format `torch_dist` in two tensor ranks and two stages."""
    small_checkpoint.write(tmp_path / "a", rng_state=True, ckpt_format="torch")
    assert transform(tmp_path / "a", tmp_path / "b", "--tp", "2", "--pp", "2", "--verify", *SHARDED) == 0
    return tmp_path / "b"


def _index(root: Path) -> Path:
    return root / STEP_FOLDER / ".metadata"


def _change_index(root: Path, edit: Callable[[Any], None]) -> None:
    """Edit the index by `edit`; remove the manifest, whose checksum would differ."""
    content = pickle.loads(_index(root).read_bytes())
    edit(content)
    _index(root).write_bytes(pickle.dumps(content))
    (root / STEP_FOLDER / naming.MANIFEST).unlink()


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("sizes", ["--tp 1", "--tp 2 --pp 2", "--tp 3", "--pp 2 --vpp 2"])
def test_there_and_back(tmp_path: Path, sizes: str, described: bool) -> None:
    small_checkpoint.write(tmp_path / "a", described=described, ckpt_format="torch")
    assert transform(tmp_path / "a", tmp_path / "b", *sizes.split(), *SHARDED) == 0
    # The rules for buffers are used only without a layout file.
    target = ["--tp", "1", "--pp", "1", "--dp", "1"]
    assert transform(tmp_path / "b", tmp_path / "c", *target) == 0
    assert transform(tmp_path / "a", tmp_path / "d", *target) == 0
    assert small_checkpoint.contents(tmp_path / "c") == small_checkpoint.contents(tmp_path / "d")
    assert manifest.defects(tmp_path / "b" / STEP_FOLDER) == []
    assert tracker.tracked_step(tmp_path / "b") == STEP


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_loads_a_transformed_checkpoint(tmp_path: Path, sharded: Path) -> None:
    source = small_checkpoint.write(tmp_path / "again")
    reader = FileSystemReader(str(sharded / STEP_FOLDER))
    stored = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    objects = [name for name, entry in stored.items() if isinstance(entry, BytesStorageMetadata)]
    assert objects == [f"rng_state/shard_{pp}.{tp}_2.2" for pp in range(2) for tp in range(2)]
    load(state, storage_reader=reader, no_dist=True)
    name = "decoder.layers.3.mlp.linear_fc1.weight"
    assert torch.equal(state[f"{name}_w"], source[name][:FFN])
    assert torch.equal(state[f"optimizer.state.param.{name}_v"], source[name][FFN:].float())
    assert torch.equal(
        state["embedding.word_embeddings.weight"][:20], source["embedding.word_embeddings.weight"]
    )
    assert state["optimizer.state.exp_avg.decoder.final_layernorm.weight"].all()


def test_from_one_to_another_layout_of_the_same_format(tmp_path: Path, sharded: Path) -> None:
    assert transform(sharded, tmp_path / "c", "--tp", "3", "--pp", "1", "--dp", "1", *SHARDED) == 0
    assert transform(tmp_path / "a", tmp_path / "d", "--tp", "3", *SHARDED) == 0
    written, expected = (
        FileSystemReader(str(tmp_path / folder / STEP_FOLDER)).read_metadata().state_dict_metadata
        for folder in "cd"
    )
    assert written == expected
    assert transform(tmp_path / "c", tmp_path / "e", "--tp", "1", "--dp", "1") == 0
    assert transform(tmp_path / "d", tmp_path / "f", "--tp", "1", "--dp", "1") == 0
    assert small_checkpoint.contents(tmp_path / "e") == small_checkpoint.contents(tmp_path / "f")


def test_the_files_that_a_rank_needs(
    sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert transform(sharded, tmp_path / "c", "--tp", "2", "--pp", "4", "--needs", "tp=1,pp=3") == 0
    # The tied embedding is in the first stage; the first tensor rank wrote the state that tensor ranks share.
    assert capsys.readouterr().out.split() == ["__1_0.distcp", "__2_0.distcp", "__3_0.distcp"]


def test_rank_by_rank(tmp_path: Path) -> None:
    small_checkpoint.write(tmp_path / "a")
    options = ["--tp", "2", *SHARDED]
    for rank in ("tp=1", "tp=0"):
        assert transform(tmp_path / "a", tmp_path / "b", *options, "--rank", rank) == 0
    assert transform(tmp_path / "a", tmp_path / "b", *options, "--resume") == 0
    assert transform(tmp_path / "a", tmp_path / "c", *options) == 0
    for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "common.pt"):
        by_rank, at_once = (tmp_path / folder / STEP_FOLDER / name for folder in "bc")
        assert by_rank.read_bytes() == at_once.read_bytes()
    files = {path.name for path in (tmp_path / "b" / STEP_FOLDER).iterdir()}
    assert files >= {"metadata.json", naming.LAYOUT, naming.MANIFEST}


def test_a_resume_note_of_the_other_format_is_ignored(tmp_path: Path) -> None:
    small_checkpoint.write(tmp_path / "a")
    assert transform(tmp_path / "a", tmp_path / "b", "--tp", "2", "--rank", "tp=0") == 0
    assert transform(tmp_path / "a", tmp_path / "b", "--tp", "2", "--resume", *SHARDED) == 0
    assert manifest.defects(tmp_path / "b" / STEP_FOLDER) == []
    assert (tmp_path / "b" / STEP_FOLDER / "__0_0.distcp").exists()


def test_a_dry_run_imports_neither_numpy_nor_torch(sharded: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from adaptor.__main__ import main; code = main();"
        " assert not {'numpy', 'torch'} & sys.modules.keys(); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "transform", str(sharded), str(tmp_path / "c"), "--dry-run"]
    stdout = subprocess.run([*command, "--tp", "1"], check=True, capture_output=True, text=True).stdout
    assert stdout.startswith("step 7: TP2 PP2 to TP1 PP2, 2 of 2 ranks")


class _Boom:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/boom",)


def _hostile(content: Any) -> None:
    content.planner_data = _Boom()


def _elsewhere(content: Any) -> None:
    next(iter(content.storage_data.values())).relative_path = "../../a/file"


def _compressed(content: Any) -> None:
    next(iter(content.storage_data.values())).transform_descriptors = ["zstd"]


def _behind_the_end(content: Any) -> None:
    for key, place in content.storage_data.items():
        if key.fqn == "decoder.final_layernorm.weight":
            place.offset += 1 << 40


def _nowhere(content: Any) -> None:
    content.storage_data.pop(next(iter(content.storage_data)))


def _without_a_moment(content: Any) -> None:
    del content.state_dict_metadata["optimizer.state.exp_avg.decoder.final_layernorm.weight"]


def _of_another_shape(content: Any) -> None:
    content.state_dict_metadata["decoder.final_layernorm.weight"].size = torch.Size([24])


def _in_other_chunks(content: Any) -> None:
    chunks = content.state_dict_metadata["embedding.word_embeddings.weight"].chunks
    chunks[1].sizes = torch.Size([6, 12])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_hostile, ".metadata: has an object of posix.system; not read"),
        (_elsewhere, ".metadata: names the file '../../a/file', which is none of its folder"),
        (_compressed, ".metadata: has items that are compressed"),
        (_behind_the_end, ".distcp: ends before byte 10995"),
        (_nowhere, ".metadata: does not say where "),
        (_without_a_moment, ".metadata: has no optimizer.state.exp_avg.decoder.final_layernorm.weight"),
        (_of_another_shape, "decoder.final_layernorm.weight is bfloat16 [24]; by its"),
        (_in_other_chunks, "embedding.word_embeddings.weight is in other chunks than TP2 PP2 of its"),
    ],
)
def test_an_index_that_is_wrong(
    sharded: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    edit: Callable[[Any], None],
    message: str,
) -> None:
    _change_index(sharded, edit)
    capsys.readouterr()
    assert transform(sharded, tmp_path / "c", "--tp", "1") == 2
    assert message in error_line(capsys)
    assert not Path("/tmp/boom").exists()


def _without_a_layout(folder: Path) -> None:
    (folder / naming.LAYOUT).unlink()


def _without_a_file(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


def _cut_short(folder: Path) -> None:
    os.truncate(folder / ".metadata", 1000)


def _without_an_index(folder: Path) -> None:
    (folder / ".metadata").unlink()


def _without_what_is_common(folder: Path) -> None:
    (folder / "common.pt").unlink()


def _of_zarr(folder: Path) -> None:
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))


def _without_a_format(folder: Path) -> None:
    (folder / "metadata.json").write_text("[]")


def _of_an_unknown_kind(folder: Path) -> None:
    common = torch.load(folder / "common.pt", weights_only=False)
    common["content_metadata"]["distrib_optim_sharding_type"] = "fsdp_dtensor"
    torch.save(common, folder / "common.pt")


def _of_another_step(folder: Path) -> None:
    common = torch.load(folder / "common.pt", weights_only=False)
    torch.save(common | {"iteration": STEP + 1}, folder / "common.pt")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_without_a_layout, "ttprun --ttp-layout-only"),
        (_without_a_file, "__1_0.distcp: No such file or directory"),
        (_cut_short, ".metadata: is no index of a sharded checkpoint, or is damaged"),
        (_without_an_index, ".metadata: No such file or directory"),
        (_without_what_is_common, "common.pt: missing"),
        (_of_zarr, "has the sharded format zarr; only torch_dist is read"),
        (_without_a_format, "metadata.json: says no sharded format of Megatron-core"),
        (_of_an_unknown_kind, "has optimizer state of the kind fsdp_dtensor, which is not transformed"),
        (_of_another_step, "common.pt: is not of step 7, but of step 8"),
    ],
)
def test_files_that_are_wrong(
    sharded: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    edit: Callable[[Path], None],
    message: str,
) -> None:
    edit(sharded / STEP_FOLDER)
    (sharded / STEP_FOLDER / naming.MANIFEST).unlink()
    capsys.readouterr()
    assert transform(sharded, tmp_path / "c", "--tp", "1") == 2
    assert message in error_line(capsys)


def test_a_byte_that_changed(sharded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = sharded / STEP_FOLDER / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    capsys.readouterr()
    assert transform(sharded, tmp_path / "c", "--tp", "1", "--verify") == 2
    assert "__0_0.distcp: checksum differs from the manifest" in error_line(capsys)


@pytest.mark.parametrize(("core", "code"), [("0.12.3", 2), ("0.14.0", 0), ("", 0)])
def test_a_target_that_could_not_load_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], core: str, code: int
) -> None:
    small_checkpoint.write(tmp_path / "a", described=True)
    layout = layout_file.read(tmp_path / "a" / STEP_FOLDER / naming.LAYOUT).ranks[0]
    older = msgspec.structs.replace(layout, core=core)
    (tmp_path / "older.json.gz").write_bytes(layout_file.join([layout_file.encode(older)]))
    options = ["--layout", str(tmp_path / "older.json.gz"), *SHARDED]
    assert transform(tmp_path / "a", tmp_path / "b", *options) == code
    if code:
        assert "older.json.gz is of Megatron-core 0.12.3, which does not load" in error_line(capsys)


def test_digests_are_written_for_verify_integrity(tmp_path: Path) -> None:
    """The target has digests if the source was saved with --verify-integrity, also after an interruption."""
    small_checkpoint.write(tmp_path / "a", ckpt_format="torch", verify_integrity=True)
    for rank in ("tp=0,pp=0", "tp=1,pp=0"):
        assert transform(tmp_path / "a", tmp_path / "b", "--tp", "2", *SHARDED, "--rank", rank) == 0
    assert transform(tmp_path / "a", tmp_path / "b", "--tp", "2", *SHARDED, "--resume", "--verify") == 0
    folder = tmp_path / "b" / STEP_FOLDER
    names = [".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt", "metadata.json"]
    assert framework_checks(folder) == names
    assert manifest.defects(folder) == []
    assert transform(tmp_path / "b", tmp_path / "c", "--tp", "1", "--pp", "2", *SHARDED) == 0
    assert framework_checks(tmp_path / "c" / STEP_FOLDER) == names
    assert transform(tmp_path / "b", tmp_path / "d", "--tp", "1") == 0
    assert not (tmp_path / "d" / STEP_FOLDER / dcp.INTEGRITY).exists(), "the format torch has none"


def test_no_digests_without_verify_integrity(sharded: Path) -> None:
    assert not (sharded / STEP_FOLDER / dcp.INTEGRITY).exists()
