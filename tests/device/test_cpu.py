"""The stand-ins for CUDA, each checked in its own process, because they cannot be undone."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from adaptor import devices
from adaptor.errors import ConfigError
from tests.faults import warm
from tests.waiting import captured


def run(code: str, *, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return captured(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=cwd,
        timeout=120,
    )


def on_cpu(code: str, *, cwd: Path | None = None, **environment: str) -> None:
    """Run `code` with the device active, after the import of torch; its assertions must hold."""
    start = "from adaptor import devices\ndevices.activate('cpu')\nimport torch\n"
    command = [sys.executable, "-c", start + textwrap.dedent(code)]
    warm.run(command, cwd=cwd, env={**os.environ, **environment}, code=0)


def test_no_name_touches_nothing() -> None:
    completed = run(
        "from adaptor import devices; devices.activate(''); import sys; assert 'torch' not in sys.modules"
    )
    assert completed.returncode == 0, completed.stderr


def test_an_unknown_name_is_refused_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"^TTP_DEVICE is 'gpu': it must be one of cpu, cuda, npu, or"
    ) as refused:
        devices.activate("gpu")
    assert "\n" not in str(refused.value)


def test_a_device_of_the_frameworks_own_is_not_chosen() -> None:
    with pytest.raises(ConfigError, match=r"^TTP_DEVICE is 'cuda', on which .*: leave TTP_DEVICE out$"):
        devices.activate("cuda")


def test_too_late_is_refused(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    completed = run("import megatron\nfrom adaptor import devices\ndevices.activate('cpu')", cwd=tmp_path)
    assert completed.returncode != 0
    assert "StartError: megatron was imported before the device cpu was activated" in completed.stderr


def test_activating_twice_is_activating_once() -> None:
    on_cpu("before = torch.zeros\ndevices.activate('cpu')\nassert torch.zeros is before")


def test_only_the_device_is_imported() -> None:
    on_cpu(
        """
        import sys
        ours = {name.split(".")[1] for name in sys.modules if name.startswith("adaptor.")}
        ours -= {"launchers"}  # torch's launcher has looked up its entry points before
        assert ours == {"devices", "errors", "frameworks", "patching", "patches", "plug_ins"}, ours
        frameworks = {name for name in sys.modules if name.startswith("adaptor.frameworks.")}
        assert frameworks == {"adaptor.frameworks.tested_versions"}, frameworks
        """
    )


def test_factories_take_any_cuda_device() -> None:
    on_cpu(
        """
        for device in (0, 1, "cuda", "cuda:1", torch.device("cuda", 3), torch.cuda.current_device()):
            assert torch.zeros(2, device=device).device.type == "cpu"
            assert torch.tensor([1.0], device=device, pin_memory=True).device.type == "cpu"
            assert torch.zeros(2).new_ones(2, device=device).device.type == "cpu"
            assert torch.zeros(2).to(device, torch.float64).dtype is torch.float64
            assert torch.zeros(2).cuda(device).device.type == "cpu"
            assert torch.nn.Linear(2, 2, device=device).cuda(device).to(device).weight.device.type == "cpu"
        assert torch.zeros(2, device="meta").device.type == "meta"
        """
    )


def test_tensor_types_are_named_as_on_cuda() -> None:
    on_cpu(
        """
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1).bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert torch.zeros(1).type("torch.cuda.HalfTensor").dtype is torch.float16
        assert torch.zeros(1).type(torch.float64).dtype is torch.float64
        assert torch.cuda.LongTensor([3]).dtype is torch.int64
        assert isinstance(torch.zeros(1), torch.cuda.FloatTensor)
        """
    )


def test_the_machine_has_a_device_for_each_local_rank() -> None:
    on_cpu(
        """
        assert torch.cuda.is_available() and torch.cuda.device_count() == 4
        assert torch.cuda.current_device() == 0
        assert torch.cuda.get_device_properties(0).major == torch.cuda.get_device_capability()[0]
        assert torch.cuda.memory_stats()["allocation.all.current"] == torch.cuda.memory_allocated() == 0
        torch.cuda.synchronize(), torch.cuda.empty_cache(), torch.cuda.set_device(3)
        """,
        LOCAL_WORLD_SIZE="4",
    )


def test_the_cuda_generator_is_the_cpu_generator() -> None:
    on_cpu(
        """
        torch.manual_seed(1)
        state = torch.cuda.get_rng_state()
        first = torch.rand(3)
        assert not torch.equal(torch.cuda.random.get_rng_state(device="cuda"), state)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3, device="cuda"), first)
        torch.cuda.default_generators[torch.cuda.current_device()].set_state(state)
        assert torch.equal(torch.rand(3), first)
        torch.cuda.manual_seed(1)
        assert torch.equal(torch.rand(3), first)
        """
    )


def test_a_data_loader_leaves_the_generator_alone() -> None:
    on_cpu(
        """
        torch.manual_seed(1)
        before = torch.get_rng_state()
        data = torch.utils.data.TensorDataset(torch.arange(8))
        loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True, pin_memory=True)
        assert len(list(loader)) == 4
        assert torch.equal(torch.get_rng_state(), before)
        """
    )


def test_streams_and_events() -> None:
    on_cpu(
        """
        stream = torch.cuda.Stream()
        context = torch.cuda.stream(stream)
        for _ in range(2):  # the framework keeps the context and enters it at every step
            with context, torch.cuda.device(0):
                pass
        event = stream.record_event()
        torch.cuda.current_stream().wait_event(event)
        torch.cuda.current_stream().wait_stream(stream)
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        assert end.query() and event.elapsed_time(end) >= 0
        torch.zeros(1).record_stream(stream)
        """
    )


def test_a_checkpoint_from_a_gpu_loads(tmp_path: Path) -> None:
    on_cpu(
        """
        torch.save({"w": torch.arange(3)}, "w.pt")
        for location in (None, "cuda:1", torch.device("cuda"), "cpu", lambda storage, _: storage):
            assert torch.load("w.pt", map_location=location)["w"].tolist() == [0, 1, 2]
        """,
        cwd=tmp_path,
    )


def test_nccl_is_gloo() -> None:
    on_cpu(
        """
        from pathlib import Path
        import torch.distributed as dist
        dist.init_process_group("nccl", device_id=torch.device("cuda", 0), pg_options=object())
        assert dist.get_backend() == "gloo"
        group = dist.new_group([0], backend="nccl", pg_options=object())
        assert dist.get_backend(group) == "gloo"
        names = []
        while "gloo_tcp_loop\\n" not in names:  # a new thread names itself
            names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
        assert names.count("gloo_tcp_loop\\n") == 1, "each group has a thread that polls"
        dist.barrier(device_ids=[0])
        given, taken = torch.arange(3.0), torch.zeros(3)
        dist.all_to_all_single(taken, given, (3,), torch.tensor([3]))
        assert torch.equal(given, taken)
        assert dist.P2POp(dist.isend, given, 0).op is dist.distributed_c10d.isend
        dist.destroy_process_group()
        """,
        MASTER_ADDR="localhost",
        MASTER_PORT="0",
        RANK="0",
        WORLD_SIZE="1",
    )


@pytest.mark.skipif(importlib.util.find_spec("apex") is not None, reason="apex is installed")
def test_only_two_modules_of_apex_stand_in() -> None:
    on_cpu(
        """
        from apex.normalization.fused_layer_norm import FusedLayerNormAffineFunction
        from apex.optimizers import FusedAdam, FusedSGD
        for absent in ("amp_C", "apex.multi_tensor_apply", "apex.contrib.layer_norm.layer_norm"):
            try:
                __import__(absent)
            except ImportError:
                continue
            raise AssertionError(absent)
        assert FusedAdam.__module__ == "apex.optimizers"
        """
    )


def test_an_installed_apex_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "apex.py").write_text("installed = True")
    on_cpu("import apex\nassert apex.installed", cwd=tmp_path)


def test_fused_adam_is_adamw_that_keeps_its_step_in_the_group() -> None:
    on_cpu(
        """
        from apex.optimizers import FusedAdam
        def trained(kind, **kwargs):
            torch.manual_seed(3)
            params = [torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.randn(2, 3))]
            optimizer = kind(params, lr=0.1, weight_decay=0.1, **kwargs)
            for _ in range(3):
                optimizer.zero_grad()
                sum((param ** 2).sum() for param in params).backward()
                optimizer.step()
            return params, optimizer
        for reference, mode in ((torch.optim.AdamW, True), (torch.optim.Adam, False)):
            expected, _ = trained(reference, foreach=False)
            found, optimizer = trained(FusedAdam, adam_w_mode=mode)
            assert all(torch.equal(one, other) for one, other in zip(expected, found))
            assert optimizer.state_dict()["param_groups"][0]["step"] == 3
            assert set(optimizer.state_dict()["state"][0]) == {"exp_avg", "exp_avg_sq"}
        try:
            trained(FusedAdam, capturable=True)
        except ValueError as error:
            assert "capturable is True" in str(error)
        else:
            raise AssertionError("there are no CUDA graphs here")
        """
    )


def test_names_the_framework_forgot_are_supplied(tmp_path: Path) -> None:
    package = tmp_path / "megatron" / "core" / "transformer" / "moe"
    package.mkdir(parents=True)
    (package / "moe_utils.py").write_text("")
    (tmp_path / "megatron" / "core" / "model_parallel_config.py").write_text("warnings = 'its own'")
    on_cpu(
        """
        import megatron.core.model_parallel_config as config, megatron.core.transformer.moe.moe_utils as moe
        assert moe.te_general_gemm is None and config.warnings == "its own"
        """,
        cwd=tmp_path,
    )


def test_a_spawned_process_does_not_import_the_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing, sys
            assert __name__ == "__main__", "imported again"
            import torch
            assert torch.cuda.is_available()
            assert sys.argv[1:] == ["--flag"] and sys.path[0] == SCRIPT_DIRECTORY
            with multiprocessing.get_context("spawn").Manager() as manager:
                assert list(manager.list([1])) == [1]
            print("trained")
            """
        ).replace("SCRIPT_DIRECTORY", repr(str(tmp_path)))
    )
    completed = captured([sys.executable, "-m", "adaptor.devices", "cpu", script, "--flag"], timeout=120)
    assert completed.stdout == "trained\n", completed.stderr


SCRIPT = """
import atexit, sys, threading

class Tensor:
    def __del__(self):
        print("taken down")

kept = Tensor()
atexit.register(print, "registered for the exit")
go = threading.Event()
threading.Thread(target=lambda: (go.wait(), print("a thread"))).start()
atexit.register(print, "registered later")
print("the script", end=" ")
go.set()
"""


EXITED = ["the script a thread", "registered later", "registered for the exit"]


@pytest.mark.parametrize(
    ("end", "code", "lines"),
    [("", 0, EXITED), ("sys.exit(0)", 0, EXITED), ("sys.exit(3)", 3, [*EXITED, "taken down"])],
    ids=["end", "exit-0", "exit-3"],
)
def test_the_end_of_a_script(end: str, code: int, lines: list[str], tmp_path: Path) -> None:
    """All that is registered is done; the interpreter is only taken down after a failure."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + end)
    completed = captured(
        [sys.executable, "-m", "adaptor.devices", "cpu", str(script)], timeout=120, code=code
    )
    assert completed.stdout.splitlines() == lines
