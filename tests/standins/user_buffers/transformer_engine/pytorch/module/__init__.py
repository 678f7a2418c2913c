"""Stands in for Transformer Engine: its user buffers alone."""
