"""The pool as a machine without I/O.

One way in, ``Pool.handle(event, now)``, and one way out, the effects it returns.
``now`` is monotonic seconds; wall time, ids and tokens that must be unpredictable
come in with the events. The same events give the same effects, always. Searches
are bounded by counted steps, never by time.
"""
