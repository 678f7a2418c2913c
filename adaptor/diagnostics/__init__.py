"""The recordings that a user asks for of chosen steps: a trace of the profiler, values of tensors."""
