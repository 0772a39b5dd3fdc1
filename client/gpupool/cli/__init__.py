"""The command line ``gpupool``: one file per subject, on top of the SDK."""
