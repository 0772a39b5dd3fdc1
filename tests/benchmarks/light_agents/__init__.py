"""Peers that speak the node protocol and nothing else, many in one process.

Each has its own TCP connection, says what an agent of a DGX H100 says, keeps its
assignments over reconnects and spreads those as agents do. There is no driver, no book and
no disk behind it: it shows what the allocator does when the agents cost next to nothing.
"""
