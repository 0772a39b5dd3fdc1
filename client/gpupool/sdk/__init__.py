"""How the SDK speaks with a pool; what users need is exported by ``gpupool``."""
