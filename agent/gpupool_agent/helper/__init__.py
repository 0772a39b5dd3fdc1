"""The root helper: the few things that only root may do, asked for by the agent.

It knows neither the wire nor the agent's core, and it believes nothing that it is told:
every argument is checked here again, and no path ever comes from a peer.
"""
