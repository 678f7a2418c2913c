"""The interface of MindIO TTP, on the engine of ttp-adaptor: names only, the rest is in `adaptor.mindio`."""
