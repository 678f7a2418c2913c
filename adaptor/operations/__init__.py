"""What an operator reads of a job: the files that ttprun writes of it, and the command `ttp`."""
