"""The machine behind the agent: one file a kind, each behind a Protocol."""
