"""What the library does not do yet, by row and entrance, with the reason: strict xfails."""

_BOTH = ("accumulator", "big_step")
_ROWS = [
    (_BOTH, "AdaLoRA's identity has no gradient, and may be data", "adalora"),
    (_BOTH, "no graph says whose nodes an index adds up", "graph-energies-of-nodes pyg-schnet"),
    (_BOTH, "no graph says between whose nodes messages go", "pyg-node-classification"),
    (("big_step",), "terms of single pictures, divided by their number", "smp-lovasz-per-image"),
    (("big_step",), "what a divisor counts is not seen in its sum", "detection-over-positives smoothed-kl-over-tokens"),
    (_BOTH, "data of the same sample is taken for other samples", "soft-dtw"),
    (
        _BOTH,
        "a softmax over two choices of one sample is the graph of one over two samples",
        "bert-multiple-choice-one-by-one",
    ),
]
OPEN = {
    f"{name}/{entrance}": reason
    for entrances, reason, names in _ROWS
    for name in names.split()
    for entrance in entrances
}
