"""Spare processes and spare nodes, and how they take the place of lost ones."""
