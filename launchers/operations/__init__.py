"""The part of `ttprun` for operators: the process that serves the files of a job, and notices."""
