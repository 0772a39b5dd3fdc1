"""The way of a node's own clients to the pool: a Unix socket that knows who calls."""
