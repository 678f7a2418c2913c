"""Adapters of low rank."""
