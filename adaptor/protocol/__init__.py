"""The common ground of workers, agents and the controller: messages, their encoding, boards, names."""
