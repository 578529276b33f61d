"""`promoe plan`: whether a model runs on this machine, how fast, what limits it, and the command to copy.

A pure core (sizes, what fits, how fast, which to choose) between what reads headers and what measures the machine.
"""
