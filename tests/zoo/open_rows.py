"""What the library does not do yet, by row and entrance, with the reason: strict xfails."""

_BOTH = ("accumulator", "big_step")
_ROWS = [
    (_BOTH, "a sum times 0 is refused", "masked-regression-times-zero"),
    (_BOTH, "a sum over dimension 0 is taken for a mean over samples", "time-major-sum-over-time"),
    (_BOTH, "an operation that is not known", "multivariate-normal stft-loss decoder-that-fills-outputs"),
    (_BOTH, "a batched product with data is taken for one with other samples", "chamfer-distance moco"),
    (_BOTH, "a computed weight is taken for samples", "spectral-norm old-spectral-norm orthogonal"),
    (_BOTH, "AdaLoRA's regularizer is taken for a function of a mean", "adalora"),
    (_BOTH, "rows taken by index are taken for coupled", "deberta-classification pml-arcface pml-cosface"),
    (_BOTH, "rows taken by index are taken for coupled", "pml-sub-center-arcface torchvision-box-iou-loss"),
    (_BOTH, "rows added by index are taken for coupled", "adaptive-softmax mixture-of-experts"),
    (_BOTH, "nodes added up to graphs are taken for coupled", "graph-energies-of-nodes pyg-schnet"),
    (_BOTH, "messages between nodes are taken for coupled", "pyg-node-classification"),
    (_BOTH, "a write in place hides that samples are coupled", "simclr pml-proxy-anchor pml-contrastive"),
    (_BOTH, "a write in place hides that samples are coupled", "sentence-batch-hard-triplet"),
    (("big_step",), "terms of single pictures, divided by their number", "smp-lovasz-per-image"),
    (("big_step",), "what a divisor counts is not seen in its sum", "detection-over-positives smoothed-kl-over-tokens"),
    (_BOTH, "rows taken by index are taken for coupled", "arcface-by-index crf"),
    (_BOTH, "data of the same sample is taken for other samples", "soft-dtw hypernetwork"),
    (("accumulator",), "three heads in three micro-batches look divided by steps", "three-heads"),
    (
        ("accumulator",),
        "three samples in three micro-batches look divided by steps",
        "one-sample-after-the-other-summed",
    ),
    (_BOTH, "one sample of two choices looks like two samples", "bert-multiple-choice-one-by-one"),
]
OPEN = {
    f"{name}/{entrance}": reason
    for entrances, reason, names in _ROWS
    for name in names.split()
    for entrance in entrances
}
