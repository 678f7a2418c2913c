"""What a user asks to be recorded of chosen steps: a trace of the profiler, values of tensors."""
