"""A stand-in for ModelOpt 0.47 on a CPU: a student with a teacher, and the saved state of the student.

Written after ModelOpt's sources; the teacher's outputs and the losses are the framework's own code.
"""

__version__ = "0.47.0"
