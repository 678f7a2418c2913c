"""Registers the accelerator of DeepSpeed; the stand-in for DeepSpeed has no other."""
