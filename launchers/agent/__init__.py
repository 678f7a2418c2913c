"""The agent of a node: the parent of its workers, on top of torch elastic."""
