"""A stand-in for the package grouped_gemm, whose kernels need a GPU: separate products of matrices."""

from __future__ import annotations

import torch


class ops:
    """Its module `ops`."""

    @staticmethod
    def gmm(
        a: torch.Tensor, b: torch.Tensor, batch_sizes: torch.Tensor, trans_b: bool = False
    ) -> torch.Tensor:
        """Multiply each expert's rows of `a` by its matrix of `b`."""
        parts = torch.split(a, batch_sizes.tolist())
        matrices = b.transpose(-1, -2) if trans_b else b
        return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])
