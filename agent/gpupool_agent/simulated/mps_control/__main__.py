"""The program: -d and -f start the daemon, without flags it is the daemon's shell."""

import os
import sys

VERSION = "CUDA MPS Control for Linux/Unix (simulated by gpupool)."
EXIT_REFUSED = 1


def main(arguments: list[str]) -> int:
    """Run the program; gives its exit code."""
    if arguments in (["-h"], ["--help"], ["-v"]):
        print(VERSION)
        return 0
    if arguments in (["-d"], ["-f"]):
        return _start(background=arguments == ["-d"])
    if arguments:
        return EXIT_REFUSED
    from gpupool_agent.simulated.mps_control.shell import run

    return run()


def _start(*, background: bool) -> int:
    if not background:
        return _serve(None)
    ready, tell = os.pipe()
    if os.fork():
        os.close(tell)
        # One byte: it listens. None: it has ended, and has said why.
        return 0 if os.read(ready, 1) else EXIT_REFUSED
    os.close(ready)
    os.setsid()
    os._exit(_serve(tell))


def _serve(tell: int | None) -> int:
    from gpupool_agent.simulated.mps_control import host
    from gpupool_agent.simulated.mps_control.daemon import AlreadyRunningError, Daemon

    host.name_process()
    try:
        daemon = Daemon(echo=tell is None)
    except AlreadyRunningError:
        print("An instance of this daemon is already running", flush=True)
        return EXIT_REFUSED
    except OSError as error:
        print(f"Cannot access CUDA_MPS_PIPE_DIRECTORY={host.pipe_directory()}: {error}", flush=True)
        return EXIT_REFUSED
    daemon.write_pid()
    if tell is not None:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.write(tell, b".")
        os.close(tell)
    return daemon.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
