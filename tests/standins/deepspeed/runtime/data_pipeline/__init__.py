"""A package of DeepSpeed: names alone."""
