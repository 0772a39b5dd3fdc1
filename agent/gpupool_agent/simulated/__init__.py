"""Simulated hosts: the agent unchanged over described machines.

Real pynvml runs over :mod:`nvml_library`, which answers for the node that the
calling context names; the other adapters read what a node writes down (a /sys
tree, files of GPU processes). Nothing outside this package may import it.
"""
