"""Checkpoints in an object store: named by a URL, pushed, listed, chosen, pulled, checked and removed."""
