"""`promoe demo`: what caching, preemption, reordering, eviction and prefetch each buy, shown on a trained model.

options, example     what was asked for; where the demo model and its prompts are
setups               the real machine whose balance of transfer and compute part 1 imitates
systems              the ways to serve a model that are compared
comparison           one part: reference, interleaved runs, verification, bounds
show                 what is printed
command              both parts in order
"""
