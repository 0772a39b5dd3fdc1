"""Generated gRPC stubs of package gpupool.v1; see scripts/generate."""
