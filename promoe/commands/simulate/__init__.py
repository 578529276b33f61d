"""`promoe simulate`: what a machine would do with a model, from recorded routing: the real scheduler under a virtual clock.

All modules but `command` know only the scheduler, traces and numbers. They start no thread and read no real clock, so the
same input gives the same output to the byte.
"""
