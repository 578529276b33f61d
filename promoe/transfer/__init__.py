"""Moves bytes into slots.

A *pool* holds slots: in RAM (`memory`) or on a device (`device_pool`). A *link* (`links`) moves one chunk of an expert
from its store into a slot; links differ in where the bytes come from, and a link over another one checks, delays, times
or spoils what that one moves. The *engine* (`engine`) carries out the scheduler's orders: its worker threads move one
chunk at a time, while each forward begins a visit of its layer, is given groups of experts that have arrived, and waits
for the others. All that they share is behind one lock, which nobody holds during a transfer. `devices` says what a GPU
can do, and `threads` and `lifetimes` say what worker threads must leave alone and whom they must not keep alive.
`processor`, `control_groups`, `cpu_contention` and `links.free_ram` know what this machine has.
"""
