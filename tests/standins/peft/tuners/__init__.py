"""Kinds of adapters."""
