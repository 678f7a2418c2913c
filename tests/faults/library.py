"""Jobs of a script that uses Megatron-core as a library."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults import harness, keeping, sdk
from tests.faults.harness import DP4, ITERATIONS, Ended, Job, Layout
from tests.faults.namespaces import Namespaces
from tests.frameworks import prepare, record

SCRIPT = harness.ROOT / "tests/frameworks/train_core.py"


def train(
    out: Path,
    *arguments: str,
    layout: Layout = DP4,
    instances: int = 2,
    launcher: str = "ttprun",
    restarts: int = 0,
    faults: Sequence[str] = (),
    options: Sequence[str] = (),
    engine: str = "builtin",
    script: Path = SCRIPT,
    paths: Sequence[str] = (),
    network: Namespaces | None = None,
    code: int | None = None,
) -> Ended:
    """Run a job to its end.

    Args:
        arguments: of the script, besides the number of iterations.
        instances: copies of the optimizer state in a run without the adaptor.
        options: of the launcher.
        engine: builtin or mindio; the test is skipped if MindIO's SDK is not installed.
        script: a script with the same flags as `train_core.py`.
        paths: for PYTHONPATH, in front of Megatron-core's.
        network: of two nodes, each with half of the ranks; None: a single node.
        code: the exit code with which the job must end; None: any.
    """
    paths = [*paths, str(prepare.megatron_core()), os.environ.get("PYTHONPATH", "")]
    if engine == "mindio":
        options = [*options, "--ttp-engine", engine]
        paths += sdk.require()
    path = os.pathsep.join(filter(None, paths))
    copies = ("--instances", str(instances)) if launcher == "torchrun" else ()
    job = Job(
        out,
        layout,
        launcher=launcher,
        restarts=restarts,
        faults=faults,
        options=options,
        script=script,
        arguments=[*arguments, "--iters", str(ITERATIONS), *copies],
        environment={"PYTHONPATH": path, **({"TTP_TLS": "plain"} if network else {})},
        nodes=2 if network else 1,
        network=network,
        cold=engine == "mindio" or harness.COLD in os.environ,
    )
    return harness.run(job, code=code)


def undisturbed(*arguments: str, layout: Layout = DP4, instances: int = 2) -> dict[int, list[dict[str, Any]]]:
    """Return the records of a run without the adaptor and without faults.

    The run is made at the first call and kept, as the baselines of `scenario` are.
    """

    def make(out: Path) -> None:
        train(out, *arguments, layout=layout, launcher="torchrun", instances=instances, code=0)

    code = [path.read_bytes() for path in (SCRIPT, Path(__file__))]
    key = keeping.key(prepare.megatron_core(), code, arguments, layout, instances)
    return record.read(keeping.once(keeping.root() / f"library-{key[:16]}", make) / "record")
