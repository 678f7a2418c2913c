"""Sums several losses into a single loss."""

import torch

STUDENT_LOSS_KEY = "student_loss"


class DistillationLossBalancer(torch.nn.Module):
    """A base class."""
