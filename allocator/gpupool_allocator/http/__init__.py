"""The HTTP shell: health, readiness and metrics."""
