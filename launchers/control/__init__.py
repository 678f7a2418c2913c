"""Connections between the agents of a job and the controller."""
