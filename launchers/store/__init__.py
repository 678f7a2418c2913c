"""Processes of `ttprun` that exchange data and checkpoints with an object store."""
