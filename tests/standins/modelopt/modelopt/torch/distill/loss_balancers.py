"""What makes one loss of several."""

import torch

STUDENT_LOSS_KEY = "student_loss"


class DistillationLossBalancer(torch.nn.Module):
    """A base class."""
