"""What a loss was averaged over, read from its autograd graph.

readings     reads losses, and remembers how a graph of the same signature was read
terms        above the reductions: a loss is a sum of terms
reductions   one mean or sum: what it was taken over
divisors     what divides a sum: a number of its samples, or a constant
samples      below it: are the samples still apart when the model's output is reached?
broadcasts   was the output spread over other samples on the way?
origin       what is made of parameters alone: regularizers, computed weights
operations   which operation follows which rule
rules        what an operation does to samples
puts         what putting rows together does to them
selections   what choosing rows does to them
layout       where samples lie in a tensor
graph        autograd nodes as they stand
count        numbers on the host, on a device, or on the way from there; `Term`, `counted`
own_tensors  which tensors are the model's own
trail        what one reading knows and has looked at
refusals     errors where a graph cannot tell
"""
