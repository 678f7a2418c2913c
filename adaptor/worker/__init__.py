"""The worker's side: its session, the thread that answers the agent, the door."""
