"""The allocator daemon: grants leases on the pool's GPUs and keeps them alive."""
