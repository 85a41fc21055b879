"""What the library does not do yet, by row and entrance, with the reason: strict xfails."""

_BOTH = ("accumulator", "big_step")
_ROWS = [
    (_BOTH, "an empty selection is remembered as a count of 0", "masked-regression-often-empty"),
    (_BOTH, "a sum times 0 is refused", "masked-regression-times-zero"),
    (_BOTH, "a sum over dimension 0 is taken for a mean over samples", "time-major-sum-over-time"),
    (_BOTH, "rows of a parameter count as a regularizer", "ranking-over-rows-of-parameters"),
    (_BOTH, "a factor of a sum is taken for a divisor", "vae-of-the-torch-examples diffusers-autoencoder"),
    (_BOTH, "an operation that is not known", "multivariate-normal stft-loss decoder-that-fills-outputs"),
    (_BOTH, "data wider than the output is taken for other samples", "si-sdr torchmetrics-si-sdr"),
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
    (("accumulator",), "pairs by broadcasting are not seen", "pairs-by-broadcasting"),
    (
        ("big_step",),
        "a divisor is not taken for the count",
        "masked-mean-of-tokens dapo-over-all-tokens smp-lovasz-per-image",
    ),
    (("big_step",), "a divisor is not taken for the count", "detection-over-positives llama-label-smoother vit-mae"),
    (("big_step",), "update.loss raises", "token-loss-with-z-loss mean-tokens-and-mean-samples llama-distillation"),
    (("big_step",), "update.loss raises", "bert-pretraining albert-pretraining"),
    (("big_step",), "a loss of gathered values alone needs across.once", "clip-of-gathered-rows soft-dice-across"),
    (("big_step",), "a part of one sample looks coupled", "bert-multiple-choice"),
    (("big_step",), "a part of one sample is refused for another reason", "pml-supcon pml-nt-xent pml-triplet"),
    (("big_step",), "a part of one sample is refused for another reason", "pml-triplet-with-miner pml-circle"),
    (("big_step",), "a part of one sample is refused for another reason", "pml-multi-similarity-with-miner"),
    (("big_step",), "values without gradient are not seen", "hard-half-by-index"),
    (("verify",), "another cause is named", "dino-centred-by-the-batch ppo-normalized-advantages"),
    (("verify",), "another cause is named", "weights-normalized-by-the-batch"),
]
OPEN = {
    f"{name}/{entrance}": reason
    for entrances, reason, names in _ROWS
    for name in names.split()
    for entrance in entrances
}
