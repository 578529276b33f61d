"""`promoe quantize`: a checkpoint's experts in fewer bits, once, for all later runs."""
