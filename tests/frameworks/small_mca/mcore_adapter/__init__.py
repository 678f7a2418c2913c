"""A small framework with the trainer, its loop and the checkpoint layout of mcore_adapter 0.10."""

__version__ = "0.10.0.dev0"
