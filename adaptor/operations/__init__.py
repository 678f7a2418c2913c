"""The operator's view of a job: the files that ttprun writes of it, and the command `ttp`."""
