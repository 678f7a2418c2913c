"""Helpers of torch_npu for scripts that were written for CUDA."""
