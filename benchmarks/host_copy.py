"""CPU time of a copy in host memory (TTP_HOST_COPY), beside the training: `python benchmarks/host_copy.py`.

One process copies the state of Adam as a worker does, and hashes the copy: CPU seconds for each GB, the time
that the copier's thread takes from others. With a core to spare the training waits only if its step is
shorter than the copy. Under load wall time would say nothing; CPU time does.
"""

from __future__ import annotations

import os
import time
import types

import torch
from _bench import Benchmark, argument_parser, spread, table

from adaptor import descriptors
from adaptor.checkpoint.step_record import StepRecord
from adaptor.devices.device import HOST
from adaptor.host_copy import content
from adaptor.protocol.copy_file import CopyFile

_PARAM = 1 << 22


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=512, help="of optimizer state")
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    benchmark = Benchmark("host_copy", vars(options))
    torch.set_num_threads(1)
    count = max(1, options.megabytes * 1_000_000 // (12 * _PARAM))
    params = [torch.nn.Parameter(torch.randn(_PARAM)) for _ in range(count)]
    optimizer = torch.optim.AdamW(params, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    state = types.SimpleNamespace(
        optimizer=types.SimpleNamespace(optimizer=optimizer), model=[], args=None, extra={}
    )
    trainee = types.SimpleNamespace(state=state, device=HOST)
    record = StepRecord(1, {}, None, (), (), [])
    file = CopyFile(f"/proc/{os.getpid()}/fd/{descriptors.in_memory('ttp-benchmark')}")

    def room(size: int) -> memoryview:
        file.reserve(size)
        return file.content

    copied: list[float] = []
    hashed: list[float] = []
    for run in range(options.runs + 1):
        start = time.process_time()
        size = content.write(trainee, record, content.take_extra(trainee), room, lambda: False)  # type: ignore[arg-type]
        written = time.process_time()
        file.digest(size)
        if run:  # the first takes the memory
            copied.append((written - start) / size * 1e9)
            hashed.append((time.process_time() - written) / size * 1e9)
    total = [sum(pair) for pair in zip(copied, hashed, strict=True)]
    rows = [
        [name, f"{spread(values)['median']:.3f}", f"{min(values):.3f} to {max(values):.3f}"]
        for name, values in (("copy", copied), ("checksum", hashed), ("both", total))
    ]
    benchmark.finish(
        table(["CPU seconds for each GB", "median", "range"], rows),
        {"copy": spread(copied), "checksum": spread(hashed), "both": spread(total)},
    )


if __name__ == "__main__":
    main()
