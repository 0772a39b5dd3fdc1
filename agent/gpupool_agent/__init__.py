"""The node agent: reports what a host has and carries out what the pool decides."""
