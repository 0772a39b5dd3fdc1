"""A stand-in for nvidia-cuda-mps-control, protocol 2: daemon, servers and shell.

    python -m gpupool_agent.simulated.mps_control -d

``launcher`` writes a program that starts it in a tenth of the time. The package imports
next to nothing, since every command to the daemon is a process of its own: no typing,
dataclasses, pathlib, socket, re, and json only in the daemon once it listens.

As in the real one there is no secret in the socket: who may open ``control`` may also
give commands; only ``quit`` asks for the daemon's own user.
"""
