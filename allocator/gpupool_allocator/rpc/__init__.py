"""The gRPC shell: each method turns a message into a command, and a result into a message."""
