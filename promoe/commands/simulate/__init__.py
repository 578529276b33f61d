"""What a machine would do with a model: the real scheduler under a virtual clock, fed with routing that was recorded.

Knows scheduler, traces and numbers; no torch, threads or real clocks. Deterministic to the byte.
"""
