"""The platform that started `ttprun`, and the number of nodes, as its environment and files tell."""
