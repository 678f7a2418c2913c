"""A small framework with the trainer, the steps and the checkpoint layout of ms-swift 4.6.0."""

__version__ = "4.6.0"
