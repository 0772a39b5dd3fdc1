"""As much of nvidia-cuda-mps-control as the helper touches: a daemon with a socket, an echo.

With -f it is the daemon; else it sends its input there and prints what comes back. A file
"fails" beside the program has the daemon end at once, "slow" has it wait for ever.
"""

import os
import pathlib
import socket
import sys
import time

HERE = pathlib.Path(__file__).parent
CONTROL = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"]) / "control"


def daemon() -> None:
    print(f"daemon for {os.environ['CUDA_VISIBLE_DEVICES']}", flush=True)
    if (HERE / "fails").exists():
        print("no such device", flush=True)
        sys.exit(1)
    while (HERE / "slow").exists():
        time.sleep(0.01)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(CONTROL))
        listener.listen()
        while True:
            channel, _ = listener.accept()
            with channel:
                asked = b""
                while piece := channel.recv(65536):
                    asked += piece
                if asked.strip() == b"quit":
                    return
                for line in asked.decode().splitlines():
                    channel.sendall(f"{os.getpid()} {line}\n".encode())


def control() -> None:
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(str(CONTROL))
        channel.sendall(sys.stdin.buffer.read())
        channel.shutdown(socket.SHUT_WR)
        while piece := channel.recv(65536):
            sys.stdout.buffer.write(piece)


if sys.argv[1:] == ["-f"]:
    daemon()
else:
    control()
