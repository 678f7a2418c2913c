"""A job that uploads its checkpoints to an object store while it trains, and resumes from the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import obstore
import pytest

from adaptor.protocol import naming
from adaptor.store import catalog, pull
from adaptor.store.client import open_store
from tests.faults import harness, outcome
from tests.faults.harness import DP2, TP2_DP1, Job, job_in
from tests.faults.same import differences
from tests.faults.scenario import BaselineOf, assert_last_words
from tests.unit import azure_server, fault_proxy, object_store

pytestmark = pytest.mark.integration


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in object_store.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with object_store.server() as url:
        object_store.request(url, "PUT", "/bucket")
        yield url


def test_last_words_come_back_from_the_store(server: str, tmp_path: Path, baseline_of: BaselineOf) -> None:
    """The pulled checkpoint equals the framework's checkpoint of that step; another test resumes from a
    store.
    """
    baseline = baseline_of(DP2)
    job = job_in(
        tmp_path,
        DP2,
        save_interval=3,
        faults=["rank=1,step=6,phase=forward,kind=sigkill"],
        options=[
            *("--ttp-store", "s3://bucket/run7", "--ttp-store-endpoint", server),
            *("--ttp-store-also", str(tmp_path / "job" / "logs"), "--ttp-store-also", str(tmp_path / "save")),
        ],
        environment=object_store.CREDENTIALS,
    )
    result = harness.run(job, code=137)
    assert "[ttp] step 5 is in s3://bucket/run7" in result.log
    assert "are in s3://bucket/run7/outputs/node0" in result.log
    (incident,) = (tmp_path / "job" / "logs").rglob("incidents/*.json")
    store = open_store("s3://bucket/run7", server)
    outputs = f"outputs/node0{tmp_path}"
    assert store.get(f"outputs/node0{incident}", 1 << 20) == incident.read_bytes()
    assert [name for name in store.objects(outputs) if name.startswith(f"{outputs}/save")] == [
        f"{outputs}/save/{naming.TRACKER}"
    ], "checkpoints are not sent twice"
    pulled = tmp_path / "pulled"
    assert pull.pull(store, pulled).step == 5
    assert_last_words(pulled, 5, baseline)


def test_a_job_that_ends_well_leaves_its_last_checkpoint_in_the_store(
    server: str, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """The job restarts once, with the same uploader throughout."""
    baseline = baseline_of(DP2)
    job = job_in(
        tmp_path,
        DP2,
        restarts=1,
        faults=["rank=1,step=6,phase=forward,kind=sigkill"],
        options=["--ttp-store", "s3://bucket/run7", "--ttp-store-endpoint", server],
        environment=object_store.CREDENTIALS,
    )
    result = harness.run(job, code=0)
    (newest, *_) = catalog.newest_first(open_store("s3://bucket/run7", server), None, [])
    assert newest.saved_manifest.step == harness.ITERATIONS
    assert job.save is not None
    outcome.assert_same_training(result, baseline.records)
    assert "has ended" not in "".join(line for line in result.said if "sends checkpoints" in line)


@pytest.mark.parametrize("answers", [True, False])
def test_a_job_that_gets_sigterm_sends_its_last_words_in_time(
    answers: bool, server: str, tmp_path: Path
) -> None:
    """If the store takes no more requests, a line says that last words are on this machine only."""
    with fault_proxy.proxy(server) as faults:
        if not answers:  # it takes the probe
            faults.begin(lambda number, method, path: "hold before" if "mp_rank" in path else "")
        job = Job(
            tmp_path / "job",
            DP2,
            save=tmp_path / "save",
            faults=["rank=1,step=6,phase=forward,kind=tree-sigterm"],
            options=["--ttp-store", "s3://bucket/run7", "--ttp-store-endpoint", faults.url]
            # The save takes a part of it, on a busy machine more; it must be over before the test is.
            + ([] if answers else ["--ttp-grace", "20"]),
            environment=object_store.CREDENTIALS,
        )
        result = harness.run(job, code=143)
    (step,) = outcome.steps_in(tmp_path / "save")
    stored_steps = [
        entry.saved_manifest.step
        for entry in catalog.newest_first(open_store("s3://bucket/run7", server), None, [])
    ]
    if answers:
        assert stored_steps == [step]
    else:
        assert stored_steps == []
        place = f"{tmp_path / 'save'}, not in s3://bucket/run7: TTP_GRACE is over"
        assert f"[ttp] step {step} is only in {place}" in result.log


def test_a_store_that_is_not_there_starts_nothing(server: str, tmp_path: Path) -> None:
    job = job_in(
        tmp_path,
        DP2,
        options=["--ttp-store", "s3://nowhere/run7", "--ttp-store-endpoint", server],
        environment=object_store.CREDENTIALS,
    )
    result = harness.run(job, code=2)
    assert result.log.splitlines() == [
        f"ttprun: error: TTP_STORE: s3://nowhere/run7: there is no bucket nowhere in {server}"
    ]
    assert not (tmp_path / "save").exists()


@dataclass(frozen=True)
class Place:
    """A prefix in a store, where the store answers, and its credentials."""

    url: str
    endpoint: str
    credentials: Mapping[str, str]


@pytest.fixture(params=["s3", "az"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    if request.param == "s3":
        endpoint = request.getfixturevalue("server")
        yield Place("s3://bucket/run7", endpoint, object_store.CREDENTIALS)
        return
    for name, value in azure_server.CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with azure_server.server() as endpoint:
        azure_server.make_container(endpoint, "container")
        yield Place("az://container/run7", endpoint, azure_server.CREDENTIALS)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_is_resumed_on_empty_machines(
    nodes: int, place: Place, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """`--load s3://...`: the save folder is not there, and the job trains on as if nothing had happened."""
    baseline = baseline_of(DP2)
    stored = ["--ttp-store", place.url, "--ttp-store-endpoint", place.endpoint]

    def job(name: str, **job_options: Any) -> Job:
        return Job(
            tmp_path / name,
            DP2,
            save=tmp_path / f"save of {name}",
            options=stored,
            environment=place.credentials,
            arguments=("--load", place.url),
            nodes=nodes,
            **job_options,
        )

    first = harness.run(job("first", faults=["rank=1,step=6,phase=forward,kind=sigkill"]))
    assert "has no checkpoint, and" in first.log
    assert f"step 5 is in {place.url}" in first.log, first.log[-3000:]
    second = harness.run(job("second"), code=0)
    assert f"[ttp] step 5 has come from {place.url} to {tmp_path / 'save of second'}" in second.log
    steps = range(6, harness.ITERATIONS + 1)
    assert {line["iteration"] for lines in second.records.values() for line in lines} == set(steps)
    outcome.assert_same_training(second, baseline.records, steps=steps)
    (newest, *_) = catalog.newest_first(open_store(place.url, place.endpoint), None, [])
    assert newest.saved_manifest.step == harness.ITERATIONS


def test_a_failed_pull_starts_no_job(server: str, tmp_path: Path) -> None:
    job = job_in(
        tmp_path,
        DP2,
        options=["--ttp-store-endpoint", server],
        environment=object_store.CREDENTIALS,
        arguments=("--load", "s3://bucket/run7", "--ckpt-step", "5"),
    )
    result = harness.run(job, code=2)
    assert "ttprun: error: --load: s3://bucket/run7: there is no complete checkpoint of step 5" in result.log
    assert "Traceback" not in result.log


def _write_tokens(prefix: Path, documents: int, length: int) -> None:
    """Write documents of random tokens in Megatron's own format, `prefix`.bin and `prefix`.idx."""
    tokens = numpy.random.default_rng(1).integers(0, 4000, documents * length, dtype=numpy.uint16)
    tokens.tofile(prefix.with_suffix(".bin"))
    head = b"MMIDIDX\0\0" + numpy.array([1], "<u8").tobytes() + bytes([8])  # 8: uint16
    counts = numpy.array([documents, documents + 1], "<u8")
    lengths = numpy.full(documents, length, "<i4")
    begins = numpy.arange(documents, dtype="<i8") * (length * tokens.itemsize)
    numbers = numpy.arange(documents + 1, dtype="<i8")
    parts = (counts, lengths, begins, numbers)
    prefix.with_suffix(".idx").write_bytes(b"".join([head, *(part.tobytes() for part in parts)]))


def test_a_job_trains_on_data_that_two_nodes_pull_to_one_folder(server: str, tmp_path: Path) -> None:
    """Each object is pulled once, and the training equals that with the same data in a folder."""
    (tmp_path / "made").mkdir()
    _write_tokens(tmp_path / "made" / "tokens", documents=64, length=100)
    objects = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    for name, content in objects.items():
        obstore.put(open_store("s3://bucket/data", server)._client, name, content)

    def job(name: str, data: Path, **job_options: Any) -> Job:
        arguments = (
            "--data-path",
            str(data / "tokens"),
            "--data-cache-path",
            str(tmp_path / f"index {name}"),
        )
        save = tmp_path / f"save of {name}"
        return Job(
            tmp_path / name,
            DP2,
            save=save,
            arguments=arguments,
            environment=object_store.CREDENTIALS,
            **job_options,
        )

    target = tmp_path / "cache" / "data"
    options = ["--ttp-pull", f"s3://bucket/data={target}"]
    with fault_proxy.proxy(server) as faults:
        options += ["--ttp-store-endpoint", faults.url]
        pulled = harness.run(job("pulled", target, nodes=2, options=options), code=0)
    read = [path.rpartition("/")[2] for _, path in faults.requests if "list-type" not in path]
    assert sorted(read) == sorted(objects)
    assert {path.name: path.read_bytes() for path in target.glob("tokens.*")} == objects
    by_hand = harness.run(job("by hand", tmp_path / "made"))
    outcome.assert_same_training(pulled, by_hand.records)


def test_both_nodes_send_their_share_of_a_shared_folder(server: str, tmp_path: Path) -> None:
    """The requests of node 0 are held until the other node has begun, and then repeated; each node sends its
    share.
    """
    with fault_proxy.proxy(server) as faults:

        def fault(number: int, method: str, path: str) -> fault_proxy.Fault:
            if method == "PUT" and path.endswith("/ttp_parts/1.json"):
                faults.release.set()
            is_held = "mp_rank" in path and method == "PUT" and not faults.release.is_set()
            return "hold before" if is_held else ""

        faults.begin(fault)
        job = job_in(
            tmp_path,
            TP2_DP1,
            options=["--ttp-store", "s3://bucket/run7", "--ttp-store-endpoint", faults.url],
            environment=object_store.CREDENTIALS,
            nodes=2,
        )
        harness.run(job, code=0)
    store = open_store("s3://bucket/run7", server)
    (entry,) = catalog.newest_first(store, None, [])
    assert entry.saved_manifest.step == harness.ITERATIONS
    lists = catalog.read_lists(store, entry.prefix, store.objects(entry.prefix))
    assert [bool(lists[node].files) for node in (0, 1)] == [True, True]
    folder = naming.final_name(harness.ITERATIONS)
    pull.pull(store, tmp_path / "pulled")
    assert differences(tmp_path / "save" / folder, tmp_path / "pulled" / folder) == []


def test_nodes_with_disks_of_their_own_send_one_checkpoint(
    server: str, tmp_path: Path, baseline_of: BaselineOf
) -> None:
    """Each disk has half of it. The job is lost, and goes on from the store on other machines."""
    baseline = baseline_of(TP2_DP1)

    def job(name: str, **job_options: Any) -> Job:
        return Job(
            tmp_path / name,
            TP2_DP1,
            save=tmp_path / f"disks of {name}",
            own_disks=True,
            save_interval=3,
            options=["--ttp-store", "s3://bucket/run7", "--ttp-store-endpoint", server],
            environment=object_store.CREDENTIALS,
            arguments=("--load", "s3://bucket/run7"),
            nodes=2,
            **job_options,
        )

    lost = job("first", faults=["rank=1,step=5,phase=forward,kind=sigkill"])
    first = harness.run(lost)
    assert set(first.codes) != {0}, first.log[-3000:]
    store = open_store("s3://bucket/run7", server)
    (entry,) = catalog.newest_first(store, None, [])
    assert entry.saved_manifest.step == 3, first.log[-3000:]
    folder = naming.final_name(3)
    for node, rank in enumerate(("mp_rank_00", "mp_rank_01")):
        assert lost.save is not None
        assert {path.parent.name for path in (lost.save / f"node{node}" / folder).rglob("*.pt")} == {rank}
    resumed = job("second")
    second = harness.run(resumed, code=0)
    assert resumed.save is not None
    assert {path.parent.name for path in (resumed.save / "node1" / folder).rglob("*.pt")} == {"mp_rank_01"}
    steps = range(4, harness.ITERATIONS + 1)
    assert {line["iteration"] for lines in second.records.values() for line in lines} == set(steps)
    outcome.assert_same_training(second, baseline.records, steps=steps)
    (newest, *_) = catalog.newest_first(store, None, [])
    assert newest.saved_manifest.step == harness.ITERATIONS
    assert list(catalog.wrong_files(store, newest)) == []
