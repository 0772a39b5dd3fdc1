"""MPS for real: one control daemon a GPU, through the privileged helper.

``daemons`` is the door (``MpsControl``); ``control`` speaks to one daemon, ``records``
keeps what a restart of the agent must find again, ``release`` ends what is left of a
slice or a daemon, ``foreign`` finds daemons of others, ``watching`` looks after ours,
``modes`` reads what NVML knows.
"""
