"""What started `ttprun`, and how many nodes there are: read from the environment and files of a platform."""
