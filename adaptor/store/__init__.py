"""Checkpoints in an object store: named by a URL, pushed, listed, chosen, pulled, checked and removed.

Each function that makes a request raises StoreError if the store refuses, or does not answer.
"""
