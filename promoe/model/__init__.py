"""A whole model of Transformers: open it, hook it, observe its passes, and restore it.

    opening          opens a checkpoint without its experts
    attach           hooks the layers of a model, with an exact undo
    passes           where each forward pass begins and ends, and what it is
    placement        moves everything but the experts to the device that has the slots
    offloading       `patch(store="disk")`: takes experts out of RAM; `spool` writes them if no checkpoint has them
    slot_folders     experts in files of their own, as they lie in slots: `packing` for speed, `quantizing` in fewer bits
    identity         tells two checkpoints apart; `context` says how long a prompt and its answer may be
    changed_weights  notices weights in RAM that changed after patching
    refusals         what a patched model refuses
    restoring        reads experts back into ordinary tensors

It does not know who computes the experts, or when their weights move.
"""
