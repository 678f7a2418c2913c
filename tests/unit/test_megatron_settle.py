"""What an exception leaves half done in Megatron, put away before the training loop is called again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adaptor.frameworks.megatron_settle import settle_core, settle_optimizer


class Work:
    """Broken work of the abandoned step."""

    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1
        raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize("several", [False, True], ids=["Megatron-LM", "MindSpeed"])
def test_broken_work_is_waited_for_and_forgotten(several: bool) -> None:
    """Megatron-LM has one handle for all buckets of a group, MindSpeed a list of them."""
    works = [Work(), Work()] if several else [Work()]
    group = SimpleNamespace(
        grad_reduce_handle=None,
        param_gather_handle=works if several else works[0],
        param_gather_dispatched=True,
        reset=lambda: None,
    )
    chunk = SimpleNamespace(bucket_groups=[group], parameters=lambda: iter(()))
    settle_core([chunk])
    assert [work.waited for work in works] == [1] * len(works)
    assert group.param_gather_handle is None
    assert group.param_gather_dispatched is False


def test_what_all_ranks_were_asked_once_is_asked_again() -> None:
    """Megatron-LM 0.20 asks all ranks in its first step whether any has parameters of another norm. A
    new process would ask alone."""
    learned: dict[str, Any] = {"_has_grad_norm_group_cache": {"separate": False}}
    one, older = SimpleNamespace(**learned), SimpleNamespace()
    chain = SimpleNamespace(chained_optimizers=[one, older], **learned)
    settle_optimizer(chain)
    assert one._has_grad_norm_group_cache is None
    assert chain._has_grad_norm_group_cache is None
    assert not hasattr(older, "_has_grad_norm_group_cache")
    settle_optimizer(one)
    settle_optimizer(older)
