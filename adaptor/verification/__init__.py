"""The proof of each step: checksums of optimizer shards, and their comparison among the holders."""
