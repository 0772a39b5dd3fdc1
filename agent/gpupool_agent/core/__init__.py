"""The agent's decisions, without any I/O: desired state against what is."""
