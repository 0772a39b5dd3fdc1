"""gpupool: the GPUs of many hosts as one pool.

The package holds what the outside imports: the SDK (``Client``, ``AsyncClient``),
the command line ``gpupool``, the generated stubs in ``gpupool.v1`` and the shared
words in ``gpupool.model``.
"""

__version__ = "0.1.0"
