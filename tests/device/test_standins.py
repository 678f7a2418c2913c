"""The stand-ins for packages that exist only on Ascend machines (tests/standins)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.faults import warm

STANDINS = Path(__file__).resolve().parents[1] / "standins"
# In a child process: the stand-ins replace functions of torch.
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

# Attention with a causal mask, and its gradients: torch's own, at once and of two blocks of keys.
query, key, value, wanted = (torch.randn(6, 2, 8, requires_grad=True) for _ in range(4))
by_head = lambda x: x.view(6, 2, 2, 4).permute(1, 2, 0, 3)
attention = torch.nn.functional.scaled_dot_product_attention
expected = attention(*map(by_head, (query, key, value)), is_causal=True)
expected.backward(by_head(wanted).detach())
whole = {"atten_mask": torch.ones(2048, 2048).triu(1).bool(), "sparse_mode": 3}
found, largest, total, *_ = torch_npu.npu_fusion_attention(query, key, value, 2, "SBH", scale=0.5, **whole)
torch.testing.assert_close(by_head(found), expected)
gradients = torch.autograd.grad(found, (query, key, value), wanted)
given = {"softmax_max": largest, "softmax_sum": total, "attention_in": found, "scale_value": 0.5}
first = torch_npu.npu_fusion_attention_grad(query, key, value, wanted, 2, "SBH", **given, **whole)
for one, other, third in zip(gradients, first, (query, key, value), strict=True):
    torch.testing.assert_close(one, third.grad)
    torch.testing.assert_close(other, third.grad)
masks = torch.ones(6, 6).triu(1).bool().split(3, dim=1)
blocks = [
    torch_npu.npu_fusion_attention_grad(query, k, v, wanted, 2, "SBH", atten_mask=mask, **given)
    for k, v, mask in zip(key.split(3), value.split(3), masks, strict=True)
]
torch.testing.assert_close(blocks[0][0] + blocks[1][0], query.grad)
torch.testing.assert_close(torch.cat([block[2] for block in blocks]), value.grad)

# Packed sequences: each attends only to itself.
rows = [x.detach()[:, 0].view(6, 2, 4) for x in (query, key, value)]
band = {"sparse_mode": 4, "pre_tockens": 6, "next_tockens": 0, "actual_seq_qlen": [2, 5]}
packed = torch_npu.npu_fusion_attention(*rows, 2, "TND", scale=0.5, **band)[0]
for part in (slice(0, 2), slice(2, 5)):
    alone = attention(*(x[part].transpose(0, 1) for x in rows), is_causal=True).transpose(0, 1)
    torch.testing.assert_close(packed[part], alone)
assert packed[5:].eq(0).all()

# Dropout is drawn from the generator of the device, and drawn again from the seed.
given = (query, key, value, 2, "SBH")
torch.manual_seed(3)
found, largest, total, _, seed, *_ = torch_npu.npu_fusion_attention(*given, keep_prob=0.5)
torch.manual_seed(3)
assert torch_npu.npu_fusion_attention(*given, keep_prob=0.5)[0].equal(found)
given = {"softmax_max": largest, "softmax_sum": total, "attention_in": found, "seed": seed, "keep_prob": 0.5}
again = torch_npu.npu_fusion_attention_grad(query, key, value, wanted, 2, "SBH", **given)
for one, other in zip(again, torch.autograd.grad(found, (query, key, value), wanted), strict=True):
    torch.testing.assert_close(one, other)
"""


def test_the_stand_ins_compute_correct_results() -> None:
    path = os.pathsep.join(map(str, (STANDINS, STANDINS / "hugging_face")))
    environment = {**os.environ, "PYTHONPATH": path}
    warm.run([sys.executable, "-c", SCRIPT], env=environment, code=0)


def test_packages_that_may_be_installed_are_on_a_path_of_their_own() -> None:
    """On PYTHONPATH the stand-ins would hide installed packages."""
    assert {path.name for path in (STANDINS / "hugging_face").iterdir()} == {"peft", "transformers"}
    assert not [name for name in ("peft", "transformers") if (STANDINS / name).exists()]
