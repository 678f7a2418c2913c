"""The unmodified frameworks of the tests: their preparation (`prepare.py`) and their commands."""
