"""Durable state: the Store interface, its backends, the records, the history."""
