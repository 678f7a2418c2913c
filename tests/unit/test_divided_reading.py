"""Each byte visible to several ranks is read by exactly one of them, for any set of loaded files."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adaptor.checkpoint import hashing
from adaptor.checkpoint.divided_reading import Division, Reader, views
from adaptor.protocol.naming import FileEntry

NAMES = ("mp_rank_00/model.pt", "mp_rank_01/model.pt", "__1_0.distcp", "__11_0.distcp", "common.pt")
PREFIXES = ("mp_rank_00/", "mp_rank_01/model.pt", "__1_", "__11_", "")

READERS = st.lists(
    st.builds(
        Reader,
        st.integers(0, 3),
        st.lists(st.sampled_from(PREFIXES), max_size=3).map(tuple),
        st.sampled_from(((), (1, 2), (3, 4))),
    ),
    min_size=1,
    max_size=9,
)
FILES = st.lists(
    st.builds(FileEntry, st.sampled_from(NAMES), st.integers(0, 20 << 20), st.none()),
    min_size=1,
    unique_by=lambda file: file.path,
)


@given(READERS, FILES)
def test_each_part_has_one_reader(readers: list[Reader], files: list[FileEntry]) -> None:
    divisions = [Division(rank, readers) for rank in range(len(readers))]
    for ranks in views(readers):
        full_files = [file.path for rank in ranks for file in divisions[rank].whole_files(files)]
        assert sorted(full_files) == sorted(file.path for file in files)
        for file in files:
            parts = [range(*divisions[rank].blocks(file)) for rank in ranks]
            assert [block for part in parts for block in part] == list(range(hashing.blocks_of(file)))


@given(READERS, FILES)
def test_files_that_a_node_loads_are_read_by_nodes_that_load_them(
    readers: list[Reader], files: list[FileEntry]
) -> None:
    for rank, reader in enumerate(readers):
        division = Division(rank, readers)
        for file in files:
            alike = [same_view for same_view in readers if same_view.view == reader.view]
            nodes = {same_view.node for same_view in alike if file.path.startswith(same_view.loads)}
            if nodes and reader.node not in nodes:
                assert division.blocks(file) == (0, 0)
