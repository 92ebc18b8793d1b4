"""The agent: one process a node. It starts the rank processes, watches them, and links them to the leader."""
