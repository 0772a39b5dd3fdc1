"""Stands for nvidia-cuda-mps-control on a machine that has none: a daemon with a socket."""

import os
import pathlib
import socket
import sys

CONTROL = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]) / "control"

with socket.socket(socket.AF_UNIX) as channel:
    if sys.argv[1:] == ["-f"]:
        channel.bind(str(CONTROL))
        channel.listen()
        while True:
            client, _ = channel.accept()
            with client:
                client.sendall(b"100.0\n")
    channel.connect(str(CONTROL))
    sys.stdout.write(channel.recv(100).decode())
