"""A hostile pickle in a checkpoint: `transform` refuses it in one line and runs no code of it."""

from __future__ import annotations

import codecs
import contextlib
import enum
import io
import struct
import subprocess
import sys
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path, PosixPath
from signal import Signals
from typing import Any

import numpy
import pytest
import torch

from adaptor.__main__ import main
from adaptor.checkpoint.hashing import HashingFile
from adaptor.errors import CheckpointError
from adaptor.protocol import naming
from adaptor.transform import archive, writing
from adaptor.transform.copying import Files
from tests.unit import small_checkpoint

_WATCHED = ("import", "exec", "compile", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "open")
_audited: list[str] = []
_watching = False


def _hook(event: str, arguments: Any) -> None:
    if _watching and event in _WATCHED:
        _audited.append(f"{event} {arguments}")


@pytest.fixture(scope="module", autouse=True)
def _listen() -> None:
    codecs.lookup("cp437")  # zip files use this encoding; import it before listening
    sys.addaudithook(_hook)  # Python cannot remove an audit hook


@pytest.fixture
def bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make an importable module `bomb`; return the path of the file that its import creates."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "bomb.py").write_text(
        f"open({str(tmp_path / 'burst')!r}, 'w')\nboom = print\nclass Boom: pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    yield tmp_path / "burst"
    assert "bomb" not in sys.modules


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def stack_name(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


def with_slots(**attributes: str) -> bytes:
    """BUILD, with a state whose second half is set by setattr."""
    items = b"".join(text(key) + text(value) for key, value in attributes.items())
    return b"N}(" + items + b"u\x86b"


_NAMESPACE = name("argparse", "Namespace")
_ENUM = name("megatron.core.enums", "ModelType")
_ARRAY = name("numpy._core.multiarray", "_reconstruct") + name("numpy", "ndarray") + b"K\x00\x85C\x01b\x87R"
# Pickled descriptions that only a trusting reader executes.
ATTACKS_KEPT = {
    "a member of what is no class": name("__builtin__", "getattr") + text("bomb") + text("boom") + b"\x86R",
    "a hidden attribute": name("__builtin__", "getattr") + _ENUM + text("__subclasses__") + b"\x86R",
    "an encoding that is a module": name("_codecs", "encode") + text("x") + text("bomb") + b"\x86R",
    "numpy loads an object": name("numpy", "dtype") + text("O8") + b"\x89\x88\x87R",
    "a huge array of numpy": _ARRAY
    + b"(K\x01\x8a\x06\0\0\0\0\0\x01\x85"
    + name("numpy", "dtype")
    + text("f8")
    + b"\x89\x88\x87R\x89C\x08\0\0\0\0\0\0\0\0tb",
}
_FLOATS = name("torch", "FloatStorage")


def _tensor(storage: bytes, shape: bytes, stride: bytes) -> bytes:
    arguments = storage + b"K\x00" + shape + stride + b"\x89" + name("collections", "OrderedDict") + b")R"
    return name("torch._utils", "_rebuild_tensor_v2") + b"(" + arguments + b"tR"


def _storage(key: str, count: bytes) -> bytes:
    return b"(" + text("storage") + _FLOATS + text(key) + text("cpu") + count + b"tQ"


ATTACKS: dict[str, tuple[bytes, str]] = {
    "REDUCE of os.system": (name("os", "system") + text("true") + b"\x85R", "has an object of os.system"),
    "REDUCE of a module's function": (name("bomb", "boom") + b")R", "has an object of bomb.boom"),
    "a name alone": (name("bomb", "Boom"), "has an object of bomb.Boom"),
    "STACK_GLOBAL": (stack_name("bomb", "boom") + b")R", "has an object of bomb.boom"),
    "a nested name": (stack_name("argparse", "_sys.modules"), "has an object of 'argparse'.'_sys.modules'"),
    "a nested name of the framework": (stack_name("megatron", "os.system"), "'megatron'.'os.system'"),
    "a module that is no name": (stack_name("megatron.core\nos", "x"), "has an object of 'megatron.core"),
    "BUILD renames an allowed class": (
        _NAMESPACE + with_slots(__module__="bomb", __qualname__="Boom"),
        "sets attributes of argparse.Namespace",
    ),
    "BUILD renames a class of the framework": (
        _ENUM + with_slots(__module__="bomb"),
        "sets attributes of megatron.core.enums.ModelType",
    ),
    "BUILD gives a Namespace another class": (
        _NAMESPACE + b")\x81" + with_slots(__class__="bomb"),
        "sets attributes of a Namespace",
    ),
    "BUILD gives a Namespace a __reduce_ex__": (
        _NAMESPACE + b")\x81}" + text("__reduce_ex__") + _ENUM + b"sb",
        "sets attributes of a Namespace",
    ),
    "BUILD of an OrderedDict's slots": (
        name("collections", "OrderedDict") + b")R" + with_slots(__class__="bomb"),
        "sets attributes of a OrderedDict",
    ),
    "BUILD of a constructor": (
        name("torch._utils", "_rebuild_tensor_v2") + with_slots(__module__="bomb"),
        "sets attributes of torch._utils._rebuild_tensor_v2",
    ),
    "BUILD of a list": (b"]}b", "sets attributes of a list"),
    "Namespace with arguments": (_NAMESPACE + text("bomb") + b"\x85R", "calls argparse.Namespace"),
    "REDUCE of what was made": (_ENUM + b"K\x01\x85R)R", "calls a Described"),
    "REDUCE of a text": (text("bomb") + b")R", "calls 'bomb'"),
    "eval": (name("builtins", "eval") + text("1") + b"\x85R", "has an object of builtins.eval"),
    "an import": (name("importlib", "import_module") + text("bomb") + b"\x85R", "importlib.import_module"),
    "__import__": (name("__builtin__", "__import__") + text("bomb") + b"\x85R", "__builtin__.__import__"),
    "INST": (b"(ibomb\nboom\n", "is damaged"),
    "OBJ": (b"(" + _ENUM + b"o", "is damaged"),
    "NEWOBJ": (name("bomb", "Boom") + b")\x81", "has an object of bomb.Boom"),
    "NEWOBJ_EX": (_NAMESPACE + b")}\x92", "is damaged"),
    "extension registry": (b"\x82\xf0", "is damaged"),
    "extension registry, 2 bytes": (b"\x83\xf0\x00", "is damaged"),
    "extension registry, 4 bytes": (b"\x84\xf0\x00\x00\x00", "is damaged"),
    "a persistent id as text": (b"Pbomb\n", "is damaged"),
    "a persistent id that is no storage": (text("bomb") + b"Q", "has the persistent id 'bomb'"),
    "a persistent id of another class": (
        b"(" + text("storage") + _NAMESPACE + text("0") + text("cpu") + b"K\x01tQ",
        "has the persistent id a tuple",
    ),
    "a buffer from outside": (b"\x97", "is damaged"),
    "a huge tensor in a small storage": (
        _tensor(_storage("0", b"K\x03"), b"\x8a\x06\0\0\0\0\0\x01\x85", b"K\x01\x85"),
        "is larger than its storage",
    ),
    "a huge tensor that repeats a number": (
        _tensor(_storage("0", b"K\x03"), b"\x8a\x06\0\0\0\0\0\x01\x85", b"K\x00\x85"),
        "is not contiguous",
    ),
    "a storage of another size": (
        _tensor(_storage("0", b"\x8a\x06\0\0\0\0\0\x01"), b"K\x03\x85", b"K\x01\x85"),
        "storage 0 has 12 bytes",
    ),
    "a text of 2**62 bytes": (b"\x8d" + struct.pack("<Q", 2**62) + b"x", "is damaged"),
    "a number of 2**31 bytes": (b"\x8b" + struct.pack("<i", 2**31 - 1) + b"x", "is damaged"),
    "a large number": (b"\x8b" + struct.pack("<i", 4096) + b"\x7f" * 4096, "has an integer of"),
    "a list in itself": (b"]q\x00h\x00a", "nested over 100 levels deep"),
    "lists of lists": (b"]" * 3000 + b"a" * 2999, "nested over 100 levels deep"),
    "a deep key": (b"}" + b")" + b"\x85" * 3000 + b"Ns", "as a key"),
    "lists that double": (b"]" + b"".join(b"q%c(h%ch%cl" % (i, i, i) for i in range(3)), "is damaged"),
    "tuples that double": (
        b"N" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60)),
        "has more than 8000000 values",
    ),
    "a long key, often": (
        b"}(" + b"N" * 4000 + b"tq\x000" + b"h\x00Ns" * 4000,
        "has more than 8000000 values",
    ),
    "many attributes, often": (
        b"".join((b"}(", *(text(f"a{number}") + b"N" for number in range(4000)), b"uq\x000"))
        + (_NAMESPACE + b")\x81h\x00b0") * 4000,
        "has more than 8000000 values",
    ),
    "a key whose hash others have": (b"}\x8a\x09" + b"\x01" * 9 + b"Ns", "as a key"),
    "a tensor with a length of more than 63 bits": (
        _tensor(_storage("0", b"K\x03"), b"\x8a\x09" + b"\x01" * 9 + b"\x85", b"K\x01\x85"),
        "is damaged",
    ),
    "no end": (b"]" * 10, "is damaged"),
}


def _write(file: Path, attack: bytes, method: int = zipfile.ZIP_STORED) -> None:
    """Write an archive of torch whose structure is the attack; it has a storage `0` of 12 bytes."""
    torch.save(torch.zeros(3), file)
    with zipfile.ZipFile(file) as zip_file:
        members = {member: zip_file.read(member) for member in zip_file.namelist()}
    with zipfile.ZipFile(file, "w", method) as zip_target:
        for member, content in members.items():
            zip_target.writestr(member, attack if member.endswith("data.pkl") else content)


@contextlib.contextmanager
def _nothing_runs(file: Path) -> Iterator[None]:
    """Assert that the block opens and runs nothing but the file itself."""
    global _watching
    _audited.clear()
    _watching = True
    try:
        yield
    finally:
        _watching = False
    assert [event for event in _audited if not event.startswith(f"open ('{file}'")] == []


def _refusal(file: Path) -> str:
    """Read the file; return the reason of the refusal."""
    with _nothing_runs(file), pytest.raises(CheckpointError) as refused:
        archive.read(file)
    return str(refused.value)


@pytest.mark.parametrize("attack", ATTACKS_KEPT)
def test_a_description_runs_nothing_when_read_and_written(tmp_path: Path, bomb: Path, attack: str) -> None:
    file, rewritten = tmp_path / "file.pt", tmp_path / "again.pt"
    _write(file, b"\x80\x04" + ATTACKS_KEPT[attack] + b".")
    with _nothing_runs(file):
        read = archive.read(file)
    with HashingFile(rewritten) as stream, Files() as files:
        writing.save(read, stream, "again", files)
    assert type(archive.read(rewritten)) is type(read)
    assert not bomb.exists()


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_runs_nothing(tmp_path: Path, bomb: Path, attack: str) -> None:
    content, reason = ATTACKS[attack]
    _write(tmp_path / "file.pt", b"\x80\x04" + content + b".")
    refusal = _refusal(tmp_path / "file.pt")
    assert refusal.startswith(f"{tmp_path / 'file.pt'}: ")
    assert reason in refusal
    assert "\n" not in refusal
    assert not bomb.exists()


def test_an_archive_that_unpacks_to_more(tmp_path: Path, bomb: Path) -> None:
    _write(tmp_path / "file.pt", b"\x80\x02" + b"N0" * (1 << 20), zipfile.ZIP_DEFLATED)
    assert "is compressed" in _refusal(tmp_path / "file.pt")


def test_a_storage_that_claims_more_than_the_file_has(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    _write(file, b"\x80\x02N.")
    with zipfile.ZipFile(file) as opened:
        (info,) = (member for member in opened.infolist() if "/data/" in member.filename)
    content = bytearray(file.read_bytes())
    at = content.index(b"PK\x01\x02")
    while content[at + 46 : at + 46 + len(info.filename)] != info.filename.encode():
        at = content.index(b"PK\x01\x02", at + 1)
    content[at + 20 : at + 28] = struct.pack("<2I", 1 << 30, 1 << 30)
    file.write_bytes(content)
    assert "ends before the end of file/data/0" in _refusal(file)


def test_the_command_refuses_in_one_line(
    tmp_path: Path, bomb: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The class would be imported when the arguments are written again."""
    small_checkpoint.write(tmp_path / "a")
    folder = tmp_path / "a" / naming.final_name(small_checkpoint.STEP) / "mp_rank_00"
    renamed = _NAMESPACE + with_slots(__module__="bomb", __qualname__="Boom") + b"0"
    for file in (folder / naming.MODEL_FILE, folder / naming.OPTIMIZER_FILE):
        with zipfile.ZipFile(file) as zip_file:
            members = {member: zip_file.read(member) for member in zip_file.namelist()}
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as zip_target:
            for member, content in members.items():
                hostile = content[:2] + renamed + content[2:]
                zip_target.writestr(member, hostile if member.endswith("data.pkl") else content)
    (folder.parent / naming.MANIFEST).unlink()
    assert main(["transform", str(tmp_path / "a"), str(tmp_path / "b"), "--tp", "2", "--workers", "1"]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "sets attributes of argparse.Namespace" in line
    assert not bomb.exists()
    assert not (tmp_path / "b").exists()


class ModelType(enum.Enum):
    """An enum in a module that Megatron's checkpoints name."""

    encoder_or_decoder = 1


class Settings:
    def __init__(self, depth: int) -> None:
        self.depth = depth


class Nested:
    """Pickled as some versions of Python pickle a member of a nested enum."""

    def __reduce__(self) -> Any:
        return getattr, (ModelType, "encoder_or_decoder")


for _framework_class in (ModelType, Settings):
    _framework_class.__module__ = "megatron.test_classes"


def test_the_objects_that_frameworks_save_are_rewritten_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewriting needs none of the framework's classes; loading needs them."""
    module = type(sys)("megatron.test_classes")
    vars(module).update(ModelType=ModelType, Settings=Settings)
    monkeypatch.setitem(sys.modules, "megatron", type(sys)("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.test_classes", module)
    content = {
        "args": Namespace(
            kind=ModelType.encoder_or_decoder,
            nested=Nested(),
            dtype=torch.bfloat16,
            device=torch.device("cuda:1"),
            path=PosixPath("/a/b"),
            signal=Signals.SIGTERM,
            some={1},
            half=numpy.float64(0.5),
            settings=Settings(3),
            large=1 << 100,
        ),
        "stream": io.BytesIO(b"abc"),
        "order": OrderedDict(b=1, a=(torch.Size([2, 3]), None, True, 1.5, b"\xff\x00")),
        "numpy": ("MT19937", numpy.arange(624, dtype=numpy.uint32), 3, 0, 0.0),
        (torch.bfloat16, torch.float32): [[], {}, ()],
    }
    torch.save(content, tmp_path / "one.pt")
    monkeypatch.delitem(sys.modules, "megatron.test_classes")
    monkeypatch.delitem(sys.modules, "megatron")
    read = archive.read(tmp_path / "one.pt")
    assert read["args"].large == 1 << 100
    with HashingFile(tmp_path / "two.pt") as stream, Files() as files:
        writing.save(read, stream, "two", files)
    monkeypatch.setitem(sys.modules, "megatron", type(sys)("megatron"))
    monkeypatch.setitem(sys.modules, "megatron.test_classes", module)
    rewritten = torch.load(tmp_path / "two.pt", weights_only=False)
    assert rewritten["args"].settings.depth == 3
    assert rewritten["args"].nested is ModelType.encoder_or_decoder
    assert rewritten["stream"].getvalue() == b"abc"
    assert rewritten["numpy"][1].tolist() == list(range(624))
    for key in ("kind", "dtype", "device", "path", "signal", "some", "half", "large"):
        assert getattr(rewritten["args"], key) == getattr(content["args"], key)
    assert rewritten["order"] == content["order"]
    assert rewritten[torch.bfloat16, torch.float32] == [[], {}, ()]


def test_the_attacks_work_on_a_reader_that_trusts(tmp_path: Path, bomb: Path) -> None:
    """Show that the attacks above are real."""
    content = b"\x80\x04" + ATTACKS["an import"][0] + b"."
    code = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"
    environment = {"PYTHONPATH": str(tmp_path / "modules")}
    subprocess.run([sys.executable, "-c", code], input=content, env=environment, check=True)
    assert bomb.exists()
