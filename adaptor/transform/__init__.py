"""Transforms checkpoints to other tensor, pipeline, virtual pipeline and expert parallel sizes."""
