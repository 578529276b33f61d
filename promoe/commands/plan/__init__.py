"""`promoe plan`: whether a model runs on this machine, how fast, what limits it, and the command to copy.

The core (sizes, what fits, how fast, which to choose) is arithmetic. Around it are what reads headers and what measures the
machine.
"""
