"""The hook of the doctor: `ttprun` runs the doctor in its own process."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from adaptor.hooks import AgentHooks


class DoctorHooks(AgentHooks):
    """`ttprun FLAGS -m adaptor.launchers.cli.ttp doctor` starts no worker: workers may be unable to start."""

    def ttp_command(self, parsed: argparse.Namespace) -> list[str]:
        script = parsed.training_script
        is_ttp = script == "adaptor.launchers.cli.ttp" if parsed.module else Path(script).name == "ttp"
        is_doctor = is_ttp and list(parsed.training_script_args[:1]) == ["doctor"]
        return arguments_of_job(parsed) if is_doctor else []


def arguments_of_job(parsed: argparse.Namespace) -> list[str]:
    """Return the arguments of `ttp` for a ttprun whose job is the doctor.

    Nodes, ranks and rendezvous port are taken from the flags of ttprun; the doctor's own arguments win.
    """
    from torch.distributed import run

    script_arguments, taken = list(parsed.training_script_args), list[str]()
    fewest, most_nodes = run.parse_min_max_nnodes(parsed.nnodes)
    if fewest == most_nodes and not parsed.standalone:
        taken += ["--nnodes", str(most_nodes)]
        options = (
            script_arguments[: script_arguments.index("--")] if "--" in script_arguments else script_arguments
        )
        if any(option.partition("=")[0] == "--save" for option in options):
            taken += ["--nodes", str(most_nodes)]
    with contextlib.suppress(ValueError):  # auto, on a machine that has no such device
        taken += ["--nproc-per-node", str(run.determine_local_world_size(parsed.nproc_per_node))]
    port = parsed.rdzv_endpoint.rpartition(":")[2] if parsed.rdzv_backend != "static" else parsed.master_port
    if str(port).isdigit():
        taken += ["--rdzv-port", str(port)]
    return ["doctor", *taken, *script_arguments[1:]]
