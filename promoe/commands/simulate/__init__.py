"""`promoe simulate`: what a machine would do with a model, from recorded routing: the real scheduler under a virtual clock.

All but `command` and `geometry` know only the scheduler, traces and numbers: no torch, no threads, no real clock. The same
input gives the same output to the byte.
"""
