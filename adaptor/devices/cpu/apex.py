"""Served as `apex` and `apex.normalization` by `apex_finder`: packages that hold nothing of their own."""
