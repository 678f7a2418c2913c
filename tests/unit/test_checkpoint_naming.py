from __future__ import annotations

import pytest

from adaptor.protocol import naming


def test_names_are_those_of_megatron() -> None:
    assert naming.final_name(12) == "iter_0000012"
    assert naming.temporary_name(12) == "iter_0000012_tmp"
    assert naming.regular_name(12) == "iter_0000012_saving"
    assert naming.final_name(123456789) == "iter_123456789"
    assert naming.model_parallel_folder(1) == "mp_rank_01"
    assert naming.model_parallel_folder(1, 2) == "mp_rank_01_002"
    assert naming.model_parallel_folder(1, expert_rank=3) == "mp_rank_01_003"
    assert naming.model_parallel_folder(1, 2, 3) == "mp_rank_01_002_003"


@pytest.mark.parametrize("step", [0, 12, 9_999_999, 10_000_000])
def test_a_step_is_read_back_from_its_final_name_alone(step: int) -> None:
    assert naming.step_of(naming.final_name(step)) == step
    assert naming.step_of_replaced(naming.replaced_name(step)) == step
    for name in (naming.temporary_name(step), naming.regular_name(step), naming.aside_name(step, 1)):
        assert naming.step_of(name) is None
        assert naming.step_of_replaced(name) is None


def test_only_folders_of_a_live_process_are_temporary() -> None:
    assert naming.is_temporary("iter_0000012_tmp")
    assert naming.is_temporary("iter_0000012_saving")
    assert naming.is_temporary(naming.temporary_name(12, 3))
    for name in ("iter_0000012", "aside_iter_0000012.1", "replaced_iter_0000012", "iter_12_tmp", "my_tmp"):
        assert not naming.is_temporary(name)


def test_no_two_controllers_write_to_the_same_folder() -> None:
    names = [naming.temporary_name(12, term) for term in range(12)]
    assert len(set(names)) == len(names)
    assert [naming.term_of(name) for name in names] == list(range(12))
    assert naming.term_of(naming.regular_name(12)) == 0


def test_an_agent_in_the_place_of_another_makes_a_folder_of_its_own() -> None:
    names = [naming.temporary_name(12, term, number) for term in range(3) for number in range(3)]
    assert len(set(names)) == len(names)
    assert all(map(naming.is_temporary, names))
    assert [naming.term_of(name) for name in names] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_no_two_generations_write_to_the_same_folder() -> None:
    names = [naming.temporary_name(12, 2, 1, generation) for generation in ("", "0f3a5b6c7d", "1f3a5b6c7d")]
    names += [naming.regular_name(12, generation) for generation in ("", "0f3a5b6c7d")]
    assert len(set(names)) == len(names)
    assert all(map(naming.is_temporary, names))
    assert [naming.term_of(name) for name in names] == [2, 2, 2, 0, 0]
    assert [naming.is_of(name, "0f3a5b6c7d") for name in names] == [False, True, False, False, True]
    assert not naming.is_of("iter_0000012", "")
    # A job that another engine runs may have any name.
    assert naming.regular_name(12, "a_b/../c-0") == "iter_0000012_saving_abc0"


def test_a_folder_set_aside_does_not_look_like_a_checkpoint() -> None:
    assert not naming.aside_name(12, 1).startswith("iter_")
    assert not naming.replaced_name(12).startswith("iter_")


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        naming.final_name(-1)


@pytest.mark.parametrize("generation", ["", "0f3a"])
def test_a_folder_that_is_being_removed_is_no_other_s(generation: str) -> None:
    names_made = [
        naming.temporary_name(12, 2, 1, generation),
        naming.temporary_name(12, generation=generation),
        naming.regular_name(12, generation),
    ]
    names = {*names_made, *(naming.abandoned_name(name, number) for name in names_made for number in (1, 2))}
    assert len(names) == 9
    assert all(naming.is_temporary(name) and naming.is_of(name, generation) for name in names)
    assert [name for name in names if naming.is_regular(name, generation)] == [names_made[2]]
    assert [name for name in names if naming.is_temporary_of(name, 12, 2, 1)] == [names_made[0]]
    assert naming.term_of(naming.abandoned_name(names_made[0])) == 2
