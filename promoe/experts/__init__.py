"""One MoE layer: finding it, and running it over slots.

    moe_layers   finds the MoE layers of a model; `requirements` says why one cannot be served
    adapters     how each family stores and calls its experts
    routed_ids   which experts the tokens chose, as the host needs them
    layer_call   computes one call of a layer from slots, at once or in groups as experts arrive
    kernels      what multiplies, the formats of slots, and the proofs that bits are the same
    pairs        which rows belong to which expert
    combine      adds up rows in the order of the stock kernel
    activation   gives the activation of some rows the bits that it has in the whole call
    guard        stand-ins for weights that are in files: they refuse to compute

It does not know policies, files or what makes an expert ready.
"""
