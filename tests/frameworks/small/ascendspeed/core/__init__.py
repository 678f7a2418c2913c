"""Groups of processes, and random states."""
