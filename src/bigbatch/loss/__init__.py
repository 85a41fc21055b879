"""What a loss was averaged over, read from its autograd graph.

readings     reads losses, and remembers how a graph of the same signature was read
terms        above the reductions: a loss is a sum of terms; `counted`
reductions   one mean or sum: what it was taken over
samples      below it: are the samples still apart when the model's output is reached?
origin       what is made of parameters alone: regularizers, computed weights
operations   which operation follows which rule
rules        what an operation does to samples
selections   what choosing rows does to them
layout       where samples lie in a tensor
graph        autograd nodes as they stand
count        numbers on the host or on a device
arrival      one number on its way from a device to the host
own_tensors  which tensors are the model's own
trail        what one reading looked at
refusals     errors where a graph cannot tell
"""
