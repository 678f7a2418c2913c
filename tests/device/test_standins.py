"""The stand-ins for packages that only an Ascend machine has (tests/standins)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

STANDINS = Path(__file__).resolve().parents[1] / "standins"
# In a process of its own: the stand-ins replace functions of torch.
SCRIPT = """
from adaptor.devices import cpu
cpu.activate()

import numpy, torch
import torch_npu
from torch_npu.contrib import transfer_to_npu
import deepspeed, deepspeed_npu, transformers
from deepspeed.accelerator import get_accelerator
from megatron.data import helpers

# The update is torch's AdamW, to the last digits of float32.
torch.manual_seed(1)
ours = torch.randn(1000)
theirs = ours.clone().requires_grad_()
moments = torch.zeros(1000), torch.zeros(1000)
reference = torch.optim.AdamW([theirs], lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
for step in (1, 2, 3):
    theirs.grad = torch.randn(1000)
    reference.step()
    torch_npu.npu_apply_adam_w(
        0.9 ** (step - 1), 0.99 ** (step - 1), 0.1, 0.1, 0.9, 0.99, 1e-8, theirs.grad, None, False, False,
        out=(ours, *moments),
    )
torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)

# Samples of four tokens over documents of 5, 2 and 6, read in the order 2, 0, 1: token 12 is the last.
sizes, order = numpy.array([5, 2, 6], dtype=numpy.int32), numpy.array([2, 0, 1], dtype=numpy.int32)
found = helpers.build_sample_idx(sizes, order, 4, 1, 13)
assert found.tolist() == [[0, 0], [0, 4], [1, 2], [2, 1]], found.tolist()

assert torch.zeros(1).type() == "torch.npu.FloatTensor"
assert torch.zeros(1, device="npu:0").npu().device.type == "cpu"
assert get_accelerator().device_name() == "npu"
x, mask = torch.randn(2, 1, 4, 4), torch.ones(4, 4).triu(1).bool()
assert torch_npu.npu_scaled_masked_softmax(x, mask, 0.5)[..., 0, 1:].eq(0).all()
torch.testing.assert_close(torch_npu.npu_rms_norm(x, torch.ones(4))[0].square().mean(-1), torch.ones(2, 1, 4))
"""


def test_the_stand_ins_compute_what_their_interface_says() -> None:
    environment = {**os.environ, "PYTHONPATH": str(STANDINS), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
