"""The Triton layer of the losses: the results of the ``chunked`` layer at the speed of the memory.

Nothing in here is imported before a call selects this layer, so that the package works where triton is not installed.

    forward   select      sorts the ids of a row, gathers the logits that this rank owns
              neighbours  marks the 16-byte groups that hold ids, sums up their other columns
              stats       one pass over the logits: peak and sum of exponentials, without the marked groups
              (one SUM all-reduce)
              loss        everything on [T, D, K]: losses, tails, clamps, metrics, gradient at the ids
    backward  dense       one pass: -G p_j over the whole row, zeros where the row has no weight
              fixup       overwrites the entries of the ids with what ``loss`` formed in fp32
"""
