"""Kernels that multiply the rows of a group of experts, and the formats of the matrices in slots.

* A **slot format** (`formats`) defines the bytes of a matrix in a slot, and multiplies by them. `packed` is one. A new
  format is a file in this folder and a line in `formats.FORMATS`.
* A **kernel** computes the rows of some experts: the stock kernel over stand-ins (`bank`), `row_kernel`, `slot_decode`.
* A kernel is used only after a **proof** (`proofs`) that it gives the same bits as its reference.
* One place (`choosing`) chooses the kernels of a call.
"""
