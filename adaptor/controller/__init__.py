"""The decisions of a job: no clock, no socket, no torch. Time and messages are arguments."""
