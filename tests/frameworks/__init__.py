"""The frameworks the tests train with, unmodified: where `prepare.py` puts them, and how they are run."""
