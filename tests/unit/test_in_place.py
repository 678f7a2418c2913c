"""The holders of a group write their shards into shared archives, over a real gloo group."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
import re
import sys
import threading
import types
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptor.checkpoint import (
    file_parts,
    format_torch,
    hashing,
    in_place,
    in_place_holder,
    manifest,
    publish,
    shards,
    state_writer,
)
from adaptor.checkpoint.archive_layout import ArchiveLayout, join_crcs
from adaptor.checkpoint.file_parts import NotFinite
from adaptor.checkpoint.hashing import BLOCK, BlockDigest
from adaptor.checkpoint.in_place_holder import Order
from adaptor.checkpoint.shards import DumpCancelled, Exchange
from adaptor.devices.device import Device
from adaptor.errors import CheckpointError
from tests.unit.test_checkpoint_dump import RECORD, Rank, dump, load, together, whole_state, without_padding

FILES = ("mp_rank_00/distrib_optim.pt", "mp_rank_00/model_optim_rng.pt")
DTYPES = (torch.bfloat16, torch.float32)


def same(first: Any, right: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return first.dtype == right.dtype and torch.equal(first, right)
    if isinstance(first, types.SimpleNamespace):
        return same(vars(first), vars(right))
    if isinstance(first, dict):
        return list(first) == list(right) and all(same(first[key], right[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(right) and all(map(same, first, right))
    return bool(first == right)


@pytest.mark.parametrize("block", [BLOCK, 64], ids=["small-files", "many-blocks"])
@pytest.mark.parametrize(("count", "writer"), [(1, 0), (2, 1), (4, 0), (4, 2)])
def test_the_loaded_values_equal_gathered_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, writer: int, block: int
) -> None:
    for module in (file_parts, in_place):
        monkeypatch.setattr(module, "BLOCK", block)
    monkeypatch.setattr("adaptor.checkpoint.hashing.BLOCK", block)
    results, root = dump(tmp_path, count, writer, in_place=True)
    assert [entry.path for entry in results[writer].files] == list(FILES)
    assert all(entry.xxh3_128 is None for entry in results[writer].files), "no holder has the whole"
    assert manifest.defects(root) == []
    (tmp_path / "gathered").mkdir()
    _, gathered = dump(tmp_path / "gathered", count, writer)
    for name in FILES:
        assert same(load(root / name), load(gathered / name))
        with zipfile.ZipFile(root / name) as archive:
            assert archive.testzip() is None, "the CRC-32 of each entry is right"
    for byte in (0, 70, (root / FILES[0]).stat().st_size - 1):  # each is covered by the checksum
        changed = bytearray(content := (root / FILES[0]).read_bytes())
        changed[byte] ^= 1
        (root / FILES[0]).write_bytes(changed)
        assert "checksum differs" in manifest.defects(root)[0]
        (root / FILES[0]).write_bytes(content)


def test_tensors_that_shared_a_storage_still_do(tmp_path: Path) -> None:
    _, root = dump(tmp_path, 2, 0, in_place=True)
    model = load(root / FILES[1])["model"]
    assert len({model[name].untyped_storage().data_ptr() for name in ("a", "b", "c", "tied")}) == 1


@pytest.mark.parametrize("last", [False, True])
def test_a_tensor_without_elements_is_saved_like_others(tmp_path: Path, last: bool) -> None:
    """Transformer Engine gives such a tensor for each layer without fp8 state."""
    extra = {"nothing": torch.empty(0, dtype=torch.uint8), **({} if last else {"one": torch.ones(1)})}

    def ranks(index: int) -> Rank:
        rank = Rank(index, 2)
        rank.state = dataclasses.replace(rank.state, extra=extra)
        return rank

    written, sent = _together(tmp_path, ranks=ranks)
    assert sent is None
    assert all(entry.xxh3_128 is None for entry in written.files), written
    assert _is_whole(tmp_path, written)
    assert same({key: load(tmp_path / "iter_0000012" / FILES[1])[key] for key in extra}, extra)


@pytest.mark.parametrize("error", [RuntimeError, TypeError, ValueError, AssertionError, AttributeError])
def test_code_that_refuses_stand_ins_leads_to_gathering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(*_: Any) -> Any:
        raise error("can't convert meta device type tensor to numpy")

    monkeypatch.setattr(format_torch.TorchFormat, "planned_files", refuse)
    written, sent = _together(tmp_path)
    assert sent is None
    assert all(entry.xxh3_128 is not None for entry in written.files), "one rank wrote them front to back"
    assert _is_whole(tmp_path, written)


class RankRefusedError(Exception):
    """The expected end of a rank."""


def _together(
    tmp_path: Path,
    *,
    ranks: Callable[[int], Rank] = lambda index: Rank(index, 2),
    folders: tuple[Path, Path] | None = None,
    **options: Any,
) -> list[Any]:
    """Rank 0 writes and provides shard 0, rank 1 provides shard 1; `options` apply to rank 1."""
    root = tmp_path / "iter_0000012_tmp"
    root.mkdir(exist_ok=True)
    writer_folder, holder_folder = folders or (root, root)

    def writer(group: Any) -> Any:
        exchange = Exchange(
            group, 0, [[0, 1]], folder=writer_folder, on_not_finite=options.pop("doubt", _ignore)
        )
        return state_writer.write_files(ranks(0).state, RECORD, exchange, root, 1)

    def holder(group: Any) -> Any:
        chosen = {key: value for key, value in options.items() if key != "doubt"}
        exchange = Exchange(group, 1, [[0, 1]], folder=holder_folder, **chosen)
        return state_writer.send_shards(ranks(1).state, 0, exchange)

    return together(tmp_path, [writer, holder])


def _ignore(text: str, ranks: Any) -> None:
    pass


def _files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.glob("iter_0000012_tmp/**/*") if path.is_file())


def _is_whole(tmp_path: Path, written: Any) -> bool:
    publish.publish(tmp_path, 12, written.files, {}, 2)
    saved = load(tmp_path / "iter_0000012" / FILES[0])[0][DTYPES]
    return all(torch.equal(saved[key], without_padding(expected)) for key, expected in whole_state().items())


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _with_other_files(folder: Path) -> Path:
    (folder / "mp_rank_00").mkdir(parents=True)
    for name in FILES:
        (folder / f"{name}.1").write_bytes(b"of another job" * 9)
    return folder


def _with_links(folder: Path) -> Path:
    (folder.parent / "iter_0000012_tmp/mp_rank_00").mkdir(parents=True)
    folder.mkdir()
    (folder / "mp_rank_00").symlink_to(folder.parent / "iter_0000012_tmp/mp_rank_00")
    return folder


@pytest.mark.parametrize("make_folder", [Path, _empty, _with_other_files, _with_links])
def test_a_holder_that_sees_another_folder_sends_its_shards(
    tmp_path: Path, make_folder: Callable[[Path], Path]
) -> None:
    elsewhere = make_folder(tmp_path / "elsewhere")
    contents = {path: path.read_bytes() for path in elsewhere.glob("*/*") if path.is_file()}
    written, sent = _together(tmp_path, folders=(tmp_path / "iter_0000012_tmp", elsewhere))
    assert sent is None
    assert all(entry.xxh3_128 is not None for entry in written.files), "one rank wrote them front to back"
    assert _is_whole(tmp_path, written)
    if make_folder is not _with_links:
        assert {path: path.read_bytes() for path in contents} == contents, "nothing is written there"


@pytest.mark.parametrize("lost", [False, True])
def test_writes_of_another_kernel_are_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """A shared file system may lose writes of two clients to one page: then all shards are gathered."""
    seen_by_kernel, write_all = in_place_holder.seen, file_parts.write_all
    main = {}

    def of_a_kernel(descriptor: int) -> Any:
        answer = seen_by_kernel(descriptor)
        answer.kernel = str(main.setdefault(threading.get_ident(), len(main)))
        return answer

    def write(descriptor: int, data: Any, at: int) -> None:
        is_the_holder = len(main) == 2 and next(iter(main)) == threading.get_ident()
        write_all(descriptor, bytes(len(data)) if lost and is_the_holder else data, at)

    monkeypatch.setattr(in_place_holder, "seen", of_a_kernel)
    monkeypatch.setattr(file_parts, "write_all", write)
    written, sent = _together(tmp_path)
    assert sent is None
    assert [entry.xxh3_128 is not None for entry in written.files] == [lost, lost]
    assert _is_whole(tmp_path, written)


def test_a_holder_that_is_done_hears_of_the_writer_in_each_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would time out while another disk is slow."""
    orders = _orders(monkeypatch)
    writers: set[Any] = set()
    rounds: list[bool] = []
    add_content, write_for = file_parts.PartWriter.add_content, file_parts.PartWriter.write_for

    def add(self: Any, *args: Any) -> None:  # only the writer has content besides shards
        writers.add(self)
        add_content(self, *args)

    def write(self: Any, seconds: float) -> bool:
        is_done = write_for(self, seconds)
        if self in writers:
            rounds.append(is_done)
            return is_done and len(rounds) > 5
        return is_done

    monkeypatch.setattr(file_parts.PartWriter, "add_content", add)
    monkeypatch.setattr(file_parts.PartWriter, "write_for", write)
    written, sent = _together(tmp_path)
    assert sent is None
    assert len(orders) == len(rounds) + 1 > 6
    assert orders[-1] is Order.END
    assert _is_whole(tmp_path, written)


def test_holders_hear_of_the_writer_while_it_reads_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = _orders(monkeypatch)
    kernels = map(str, itertools.count())
    seen_by_kernel = in_place_holder.seen

    def of_a_kernel(descriptor: int) -> Any:
        answer = seen_by_kernel(descriptor)
        answer.kernel = next(kernels)
        return answer

    monkeypatch.setattr(in_place_holder, "seen", of_a_kernel)
    monkeypatch.setattr(in_place, "ROUND_S", 0.0)
    written, sent = _together(tmp_path)
    assert sent is None
    assert orders[-2:] == [Order.WAIT, Order.END]
    assert _is_whole(tmp_path, written)


def _orders(monkeypatch: pytest.MonkeyPatch) -> list[Order]:
    """Return a list that collects the orders a holder receives."""
    orders: list[Order] = []
    receive = in_place_holder.receive

    def received(kind: Any, *args: Any) -> Any:
        message = receive(kind, *args)
        if kind is Order:
            orders.append(message)
        return message

    monkeypatch.setattr(in_place_holder, "receive", received)
    return orders


def test_a_failure_without_a_message_is_named_by_both(tmp_path: Path) -> None:
    class Short(Device):
        def copy(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
            raise MemoryError

    written, sent = _together(tmp_path, device=Short())
    assert isinstance(sent, MemoryError)
    assert isinstance(written, CheckpointError)
    assert str(written) == "MemoryError"


def test_a_holder_whose_copy_fails_is_named_by_both_sides(tmp_path: Path) -> None:
    class Full(Device):
        def copy(self, into: torch.Tensor, tensor: torch.Tensor) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    results = _together(tmp_path, device=Full())
    for result in results:
        assert isinstance(result, CheckpointError)
        assert re.fullmatch(rf"{tmp_path}/\S+: No space left on device", str(result))
    assert _files(tmp_path) == []


def test_a_writer_whose_disk_fails_reports_the_error_and_releases_the_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, stretch: Any) -> Iterator[None]:
        raise OSError(errno.ENOSPC, "No space left on device")
        yield

    begin = file_parts.PartWriter.add_content

    def spoilt(self: Any, *args: Any) -> None:  # only the writer has content besides shards
        self._write = types.MethodType(refuse, self)
        begin(self, *args)

    monkeypatch.setattr(file_parts.PartWriter, "add_content", spoilt)
    written, sent = _together(tmp_path)
    assert sent is None, "who gave it has done its part"
    assert isinstance(written, CheckpointError)
    assert str(written).endswith("No space left on device")
    assert _files(tmp_path) == []


def test_a_holder_that_is_cancelled_at_any_time_leaves_no_files(tmp_path: Path) -> None:
    """The connection ends as at the death of the holder; the writer removes the files."""
    for allowed in range(20):
        calls = iter(range(allowed))
        options = {"cancelled": lambda calls=calls: next(calls, None) is None}
        (folder := tmp_path / str(allowed)).mkdir()
        written, sent = _together(folder, **options)
        if sent is None:
            break
        assert isinstance(sent, DumpCancelled)
        assert isinstance(written, RuntimeError)
        assert _files(folder) == []
    assert allowed > 3
    assert _is_whole(folder, written)


def test_a_writer_that_goes_away_at_any_time_ends_the_holder(tmp_path: Path) -> None:
    for allowed in range(40):
        root = tmp_path / str(allowed) / "iter_0000012_tmp"
        root.mkdir(parents=True)
        calls = iter(range(allowed))

        def writer(group: Any, root: Path = root, calls: Iterator[int] = calls) -> Any:
            exchange = Exchange(group, 0, [[0, 1]], folder=root, cancelled=lambda: next(calls, None) is None)
            return state_writer.write_files(Rank(0, 2).state, RECORD, exchange, root, 1)

        def holder(group: Any, root: Path = root) -> Any:
            exchange = Exchange(group, 1, [[0, 1]], folder=root)
            return state_writer.send_shards(Rank(1, 2).state, 0, exchange)

        written, sent = together(root.parent, [writer, holder])
        if not isinstance(written, Exception):
            break
        assert isinstance(written, DumpCancelled)
        assert sent is None or isinstance(sent, RuntimeError)
        assert _files(root.parent) == []
    assert allowed > 5
    assert _is_whole(root.parent, written)


@pytest.mark.parametrize("key", shards.KEYS)
def test_a_shard_that_is_not_finite_is_doubted_and_nothing_stays(tmp_path: Path, key: str) -> None:
    def ranks(index: int) -> Rank:
        rank = Rank(index, 2)
        if index:
            rank.states[rank.model.b][key][0] = float("nan")
        return rank

    def refuse(text: str, ranks: Any) -> None:
        raise RankRefusedError(text, list(ranks))

    written, sent = _together(tmp_path, ranks=ranks, doubt=refuse)
    assert sent is None
    assert isinstance(written, RankRefusedError)
    assert written.args == (f"shard 1 of 2 ({key}) is not finite", [1])
    assert _files(tmp_path) == []
    (second_folder := tmp_path / "again").mkdir()
    as_it_is, _ = _together(second_folder, ranks=ranks)
    assert as_it_is.not_finite == f"shard 1 of 2 ({key}) is not finite"


def test_weights_that_are_too_large_for_their_dtype_are_named(tmp_path: Path) -> None:
    def ranks(index: int) -> Rank:
        rank = Rank(index, 2, torch.float16)
        if index:
            rank.states[rank.model.b]["param"][0] = -1e30
        return rank

    written, _ = _together(tmp_path, ranks=ranks)
    assert written.not_finite == "model.b is not finite"


def test_an_unwritten_part_is_found(tmp_path: Path) -> None:
    layout: ArchiveLayout[Any] = ArchiveLayout({"a": torch.ones(9)}, lambda storage: None)
    exchange = Exchange(None, 0, [], folder=tmp_path)
    with (
        pytest.raises(CheckpointError, match=r"a\.pt: no rank has written what belongs at byte"),
        in_place.InPlace({"a.pt": layout}, [], exchange, 1) as archives,
    ):
        archives.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_dump_takes_no_memory_for_a_copy(tmp_path: Path) -> None:
    """The peak is reset first; the state has 96 MB, its copy with the weights would have 112 MB."""
    numel = 8 << 20
    rank = one_param(numel)
    root = tmp_path / "iter_0000012_tmp"
    root.mkdir()
    Path("/proc/self/clear_refs").write_text("5")
    peak_before = peak()
    exchange = Exchange(None, 0, [[0]], folder=root)
    written = state_writer.write_files(rank.state, RECORD, exchange, root, 1)
    assert peak() - peak_before < 32 << 20
    assert sum(entry.bytes for entry in written.files) > 14 * numel
    saved = load(root / f"{FILES[0]}.1")[0][DTYPES]
    assert torch.equal(saved["exp_avg"], rank.states[rank.model.a]["exp_avg"])


def peak() -> int:
    (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(peak)


def one_param(numel: int) -> Rank:
    rank = Rank(0, 1)
    data = torch.zeros(numel, dtype=torch.bfloat16)
    rank.model.register_parameter("a", torch.nn.Parameter(data))
    for name in ("b", "c", "tied"):
        delattr(rank.model, name)
    (buffer,) = rank.optimizer.buffers
    buffer.param_data, buffer.numel_unpadded = data, numel
    buffer.buckets = [
        types.SimpleNamespace(
            offset=0, numel_unpadded=numel, grad_data=types.SimpleNamespace(numel=lambda: numel)
        )
    ]
    buffer.param_index_map = {rank.model.a: (0, numel, 0)}
    place = {"gbuf_local": types.SimpleNamespace(start=0, end=numel)}
    rank.optimizer.gbuf_ranges = [{DTYPES: [{"param_map": {rank.model.a: place}}]}]
    rank.states.clear()
    rank.states[rank.model.a] = {key: torch.full((numel,), 0.5) for key in shards.KEYS}
    return rank


def half(index: int, count: int, numel: int) -> Rank:
    """Return the rank `index` of `count`, each with a shard of a model with one param."""
    rank, shard_numel = one_param(numel), numel // count
    param = rank.model.a
    place = {"gbuf_local": types.SimpleNamespace(start=0, end=shard_numel)}
    rank.optimizer.gbuf_ranges = [{DTYPES: [{"param_map": {param: place}}]}]
    rank.optimizer.data_parallel_group = types.SimpleNamespace(rank=lambda: index, size=lambda: count)
    rank.states[param] = {key: torch.rand(shard_numel) for key in shards.KEYS}
    return rank


def test_shards_of_many_blocks_are_written_unchanged(tmp_path: Path) -> None:
    """Whole blocks bypass the page cache where the disk allows direct I/O; the bytes between them do not."""
    numel = 3 << 20
    ranks = [half(index, 2, numel) for index in range(2)]
    written, sent = _together(tmp_path, ranks=lambda index: ranks[index])
    assert sent is None
    publish.publish(tmp_path, 12, written.files, {}, 2)
    assert manifest.defects(tmp_path / "iter_0000012") == []
    saved = load(tmp_path / "iter_0000012" / FILES[0])[0][DTYPES]
    for key in shards.KEYS:
        assert torch.equal(saved[key], torch.cat([rank.states[rank.model.a][key] for rank in ranks]))


def test_archives_of_more_than_four_gigabytes(tmp_path: Path) -> None:
    """Sparse: Python's and torch's readers need sizes and offsets above 32 bits."""
    make: Any = torch.UntypedStorage
    big = torch.empty(0).set_(make(5 << 30), 0, (5 << 28,), (1,))
    value = {"first": torch.ones(2), "big": big, "last": torch.arange(3.0)}
    layout = ArchiveLayout(value, lambda storage: "others" if storage.nbytes() > BLOCK else None)
    path = tmp_path / "big.pt"
    with path.open("wb") as file:
        for entry in layout.entries:
            if isinstance(entry.content, torch.Tensor):
                file_parts.write_all(file.fileno(), entry.content.numpy().tobytes(), entry.begin)
        for at, data in layout.around([0] * len(layout.entries)):
            file_parts.write_all(file.fileno(), data, at)
    assert path.stat().st_size == layout.size
    with zipfile.ZipFile(path) as archive:
        assert [info.file_size for info in archive.infolist()][-3:] == [8, 5 << 30, 12]
        assert archive.infolist()[-1].header_offset > 5 << 30
    loaded = torch.load(path, mmap=True)
    assert loaded["last"].tolist() == [0, 1, 2]
    assert loaded["big"].shape == big.shape


def test_a_crc_is_that_of_zip_files_with_isal_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(range(251)) * 5000
    for view in (data, memoryview(data)[3:], b""):
        assert hashing.crc32(view, 77) == zlib.crc32(view, 77)
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)  # as if not installed
    assert hashing._fastest_crc32() is zlib.crc32


def test_checksums_of_parts_make_that_of_the_whole() -> None:
    data = bytes(range(256)) * 5
    for first, second in ((0, 0), (0, 7), (1, 1000), (255, 256)):
        parts = [data[:first], data[first:second], data[second:]]
        assert join_crcs([(zlib.crc32(part), len(part)) for part in parts]) == zlib.crc32(data)
    assert join_crcs([]) == 0


def test_a_digest_does_not_depend_on_how_the_bytes_come() -> None:
    data = bytes(range(251)) * (3 * BLOCK // 251)
    digests = set()
    for size in (len(data), BLOCK, 1000003):
        digest = BlockDigest()
        for begin in range(0, len(data), size):
            digest.update(data[begin : begin + size])
        digests.add(digest.hexdigest())
    assert len(digests) == 1


def test_the_report_of_non_finite_numbers_names_the_param() -> None:
    """The reported range is the param's range in the world tensor, not the block's."""
    rank = Rank(0, 1, torch.float16)
    rank.states[rank.model.b]["param"][2] = 1e30
    region = file_parts.Region(0, 0, 0, 0, "param", "float16", 0, 24)
    exchange = Exchange(None, 0, [[0]])
    with Path("/dev/null").open("wb") as file:
        writer = file_parts.PartWriter([file.fileno()], exchange)
        writer.add_shards([region], [rank.optimizer], in_place_holder.own_readers([rank.optimizer], exchange))
        stretches = writer._stretches
        for stretch in stretches:
            stretch.read(0, stretch.size)
    assert writer.not_finite == [NotFinite(0, 0, "param", "float16", 0, 15, 22)]


def test_a_slow_disk_shows_progress_at_least_once_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of blocks wait in the page cache: without syncs between them the last sync would write all."""
    clock, written, synced = [0.0], [0], []

    def sync(descriptor: int) -> None:
        clock[0] += 2.0
        synced.append(written[0])

    def advance(count: int) -> None:
        written[0] += count

    monkeypatch.setattr(hashing.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(os, "fdatasync", sync)
    half = BLOCK // 2
    with (
        (tmp_path / "file").open("wb") as file,
        file_parts.PartWriter([file.fileno()], Exchange(None, 0, [[0]], progress=advance)) as writer,
    ):
        for number in range(6):
            writer.add_content(0, number * BLOCK, torch.full((half,), number, dtype=torch.uint8))
        assert writer.write_for(1000.0)
    # Each part counts after its own sync.
    assert synced == [half, 3 * half, 5 * half]
