"""The jobs of Megatron-LM that are recovered online."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import pytest

from adaptor.frameworks.megatron_online_support import of_data, of_framework, of_options, of_version

FLEX = {"moe_token_dispatcher_type": "flex", "tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    "version", ["0.12.4", "0.13.2", "0.14.1", "0.15.0rc5", "0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.20.0"]
)
def test_a_version_that_was_tested(version: str) -> None:
    assert of_version(version) == ""


@pytest.mark.parametrize("version", ["0.8.0", "0.11.0", "0.12.0rc2", "0.21.0"])
def test_a_version_that_was_not(version: str) -> None:
    reason = f"Megatron-LM {version} has not been tested with it; 0.12 to 0.20 have been"
    assert of_version(version) == reason


@pytest.mark.parametrize(
    ("packages", "reason"),
    [
        (["mindspeed", "mindspeed_llm"], ""),
        (["mindspeed"], "it has not been tested with mindspeed"),
        (["mindspeed", "modellink"], "it has not been tested with mindspeed"),
    ],
)
def test_packages_that_change_the_loop(
    packages: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MindSpeed-LLM's loop was tested; other packages on MindSpeed were not."""
    info = types.ModuleType("megatron.core.package_info")
    info.__version__ = "0.12.1"  # type: ignore[attr-defined]
    for name in ("mindspeed_llm", "mindspeed", "modellink"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in packages:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "megatron.core.package_info", info)
    assert of_framework() == reason


def test_data_that_cannot_be_read_once_more() -> None:
    """The framework wraps iterators in its own class; a script may pass others."""
    wrapped = SimpleNamespace(iterable=iter([]))
    assert of_data({"train_data_iterator": wrapped, "valid_data_iterator": None}) == ""
    assert of_data({"train_data_iterator": [wrapped, None], "valid_data_iterator": [wrapped]}) == ""
    for call in (
        {"train_data_iterator": iter([1])},
        {"train_data_iterator": wrapped, "valid_data_iterator": [wrapped, iter([1])]},
    ):
        assert of_data(call).endswith("is a list_iterator, which cannot be read once more")


EXTERNAL = "a data loader of the script's own (--dataloader-type external)"
# Its position is saved, and there is no evaluation.
OWN_LOADER = {"dataloader_type": "external", "dataloader_save": "loaders", "eval_iters": 0}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cuda_graph_impl": "none", "enable_cuda_graph": False, "async_save": True}, ""),
        ({"cuda_graph_impl": "local"}, "CUDA graphs hold the groups of the start"),
        ({"use_sharp": True}, "SHARP is bound to the groups of the start"),
        ({"iterations_to_skip": [], "moe_token_dispatcher_type": "alltoall", "cpu_offloading": False}, ""),
        ({"iterations_to_skip": [4]}, "--iterations-to-skip reads data outside of steps"),
        ({**FLEX, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1}, ""),
        (
            {**FLEX, "expert_model_parallel_size": 8},
            "DeepEP over 16 ranks, more than 8, uses NVSHMEM, which a process initializes once",
        ),
        ({**FLEX, "expert_model_parallel_size": 64, "moe_flex_dispatcher_backend": "hybridep"}, ""),
        (
            {**FLEX, "moe_flex_dispatcher_backend": "ncclep"},
            "--moe-flex-dispatcher-backend ncclep has buffers of its own between ranks",
        ),
        ({"tp_comm_overlap": True, "tp_comm_bootstrap_backend": "nccl"}, ""),
        ({"tp_comm_overlap": False, "tp_comm_bootstrap_backend": "mpi"}, ""),
        (
            {"tp_comm_overlap": True, "tp_comm_bootstrap_backend": "mpi"},
            "--tp-comm-bootstrap-backend mpi makes process groups of MPI, which are not exchanged",
        ),
        ({"delay_wgrad_compute": True}, "--delay-wgrad-compute keeps work of a step in queues of its own"),
        (
            {"overlap_dispatch_backward_with_experts_wgrad": True, "delay_wgrad_compute": False},
            "--overlap-dispatch-backward-with-experts-wgrad keeps work of a step in queues of its own",
        ),
        ({"moe_paged_stash": True}, "--moe-paged-stash keeps tensors of a step in queues of its own"),
        ({"skip_iters_range": [3, 5]}, "--skip-iters-range reads data outside of steps"),
        ({"use_dualpipev": True}, "--use-dualpipev keeps work of a step in queues of its own"),
        (
            {"fine_grained_activation_offloading": True},
            "--fine-grained-activation-offloading keeps tensors of a step in queues of its own",
        ),
        (
            {"cpu_offloading": True},
            "--cpu-offloading-num-layers keeps tensors of a step in queues of its own",
        ),
        ({"moe_shared_expert_overlap": True, "defer_embedding_wgrad_compute": True}, ""),
        ({"dataloader_type": "cyclic", "moe_router_force_biased": None, "logits_load_dir": None}, ""),
        ({"dataloader_type": "external"}, f"{EXTERNAL} may begin anew in a new process"),
        ({**OWN_LOADER, "eval_iters": 10}, f"{EXTERNAL} may begin its evaluation anew in a new process"),
        (OWN_LOADER, ""),
        ({"moe_router_force_biased": 0.5}, "--moe-router-force-biased draws numbers once for each process"),
        (
            {"moe_enable_routing_replay": True},
            "--moe-enable-routing-replay keeps the routes of a step in lists of its own",
        ),
        (
            {"export_kd_teacher_load": "teacher"},
            "--export-kd-teacher-load has all ranks load the teacher together",
        ),
        (
            {"logits_load_dir": "logits"},
            "--logits-load-dir reads a teacher's data outside of the data loader",
        ),
        ({"enable_share_memory": True}, "--enable-share-memory has all ranks meet once in each process"),
        ({"use_ascend_mc2": True, "use_ascend_coc": True, "schedules_method": None, "stage": "dpo"}, ""),
        (
            {"use_ascend_coc": True, "coc_fused_kernel": True},
            "--coc-fused-kernel has communicators of its own (LCAL), one for each process",
        ),
        (
            {"schedules_method": "dualpipev"},
            "--schedules-method keeps work of a step in schedules of its own",
        ),
    ],
)
def test_options_that_require_a_restart_of_all_ranks(options: dict[str, object], reason: str) -> None:
    assert of_options(SimpleNamespace(**options)) == reason
