"""The shared words of the pool as frozen dataclasses, without any I/O.

One word per idea, as in the protos: lease, group, member, place, device, node,
assignment, hold, event. Both cores are written in these; the wire is translated
in ``gpupool.wire``. Nothing here imports anything of ours.
"""
