"""Stands in for the process groups of torch_npu alone: see ../../README.md."""
