"""Served as `apex.normalization.fused_layer_norm`: torch's layer norm under the name of apex's."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class FusedLayerNormAffineFunction:
    """The part of apex's autograd function used by callers: `apply`, and the signature of `forward`."""

    @staticmethod
    def apply(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        normalized_shape: Sequence[int],
        eps: float,
    ) -> torch.Tensor:
        return torch.nn.functional.layer_norm(input, list(normalized_shape), weight, bias, eps)

    forward = apply
