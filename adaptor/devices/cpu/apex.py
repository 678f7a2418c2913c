"""Served as `apex` and `apex.normalization` by `apex_finder`: packages without content of their own."""
