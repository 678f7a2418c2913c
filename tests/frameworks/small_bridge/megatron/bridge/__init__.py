"""A small framework with the loop, the checkpoint layout and the trackers of Megatron-Bridge 0.3.1."""

__version__ = "0.3.1"
