"""Helpers of torch_npu."""
