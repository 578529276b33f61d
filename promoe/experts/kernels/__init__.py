"""What multiplies the rows of a group of experts.

* A **slot format** (`formats`) says what the bytes of a matrix in a slot are, and multiplies by them: `packed` is one. A new
  one is a file here and a line in `formats.FORMATS`.
* A **kernel** computes the rows of some experts: the stock kernel over stand-ins (`bank`), `row_kernel`, `slot_decode`.
* A kernel is used only after a **proof** (`proofs`) that its bits are those of its reference.
* One place chooses the kernels of a call (`choosing`).
"""
