"""A stand-in for ModelOpt 0.47 on a CPU: a student that learns from a teacher, and what is saved of it.

Written after its sources; the teacher's outputs and the losses are the framework's own code.
"""

__version__ = "0.47.0"
