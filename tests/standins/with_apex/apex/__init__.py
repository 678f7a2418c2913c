"""Stands in for apex (of Ascend), which ModelLink 1.2 imports and replaces in parts: see ../../README.md."""

from apex import multi_tensor_apply, normalization, optimizers

__all__ = ["multi_tensor_apply", "normalization", "optimizers"]
