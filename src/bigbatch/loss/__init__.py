"""What a loss was averaged over, read from its autograd graph.

readings     reads losses, and remembers how a graph of the same kind and shapes was read
terms        above the reductions: a loss is a sum of terms
reductions   one mean or sum: what it was taken over
divisors     what divides a sum: a number of its samples, or a constant
samples      below it: are the samples still apart when the model's output is reached?
origin       what a reading knows and has looked at; what is made of parameters alone; frozen weights
selections   what choosing rows and putting them together does to samples; the table of all operations
rules        what other operations do to samples
layout       where samples lie in a tensor
graph        autograd nodes as they stand
count        numbers on the host, on a device, or on the way from there; `Term`, `counted`
refusals     errors where a graph cannot tell
"""
