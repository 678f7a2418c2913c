"""The rendezvous of the nodes of a job: who takes part, in which order, and who is lost."""
