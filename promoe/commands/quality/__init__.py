"""`promoe quality`: what fewer bits change: loss, probabilities and answers, beside those of the model in 16 bits.

`metrics` is pure: tensors in, numbers out. `measuring` opens one model after the other.
"""
