# ruff: noqa: E501, D102, D103, I001 - a row of a table is a line
# fmt: off
"""Losses that people write themselves in torch: masks, mixtures, sequences, pairs, structures."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from bigbatch.errors import BatchNormError, CoupledLoss, LossError, SeveralCounts, UnreadableLoss
from tests.zoo.program import BFLOAT16, Expected, Program, refused, Rows
from tests.zoo.samples import CLASSES, WIDTH, WORDS, mlp, parts, rows

COUPLED = refused(CoupledLoss, "")
UNREADABLE = refused(UnreadableLoss, "count")
AWAKE = refused(BatchNormError, "BatchNorm")
SEVERAL = refused(SeveralCounts, "counts=")

class Tagger(nn.Module):
    """An embedding, an LSTM, a score per position."""
    def __init__(self, outputs: int = WORDS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, outputs)

    def forward(self, tokens: Tensor) -> Tensor:  # scores, (n, width, outputs)
        scores: Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return scores

class Remembering(nn.Module):
    """A recurrent layer that goes on from where the last call ended."""
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(6, 8)
        self.head = nn.Linear(8, CLASSES)
        self.hidden: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:  # scores
        start = x.new_zeros(len(x), 8)
        if self.hidden is not None:
            start = start + self.hidden.mean(0)
        hidden = self.cell(x, start)
        self.hidden = hidden.detach()
        scores: Tensor = self.head(hidden)
        return scores

class Ghost(nn.Module):
    """BatchNorm over virtual batches of two samples, as TabNet has it."""
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:  # each chunk by itself
        return torch.cat([self.norm(chunk) for chunk in x.tensor_split(max(len(x) // 2, 1))])

def factors() -> nn.Module:  # users and items as rows of parameters
    return nn.ParameterDict({"user": torch.randn(9, 4), "item": torch.randn(9, 4)})

def liked(model: Any, user: Tensor, item: Tensor) -> Tensor:  # how much each user likes the item beside it
    return (model["user"][user] * model["item"][item]).sum(1)

def experts() -> nn.Module:  # four of them, with a router, behind another layer
    return parts(first=nn.Linear(6, 6), router=nn.Linear(6, 4), experts=nn.ModuleList(nn.Linear(6, CLASSES) for _ in range(4)))

def routed(model: Any, b: Rows, *, behind: bool = True, balanced: bool = False) -> Tensor:
    """Each row takes two experts; perhaps with a term that spreads rows over experts."""
    x = model["first"](b["x"]) if behind else b["x"]
    chances = model["router"](x).softmax(-1)
    weight, chosen = chances.topk(2)
    out = x.new_zeros(len(x), CLASSES)
    for number, expert in enumerate(model["experts"]):
        row, place = (chosen == number).nonzero(as_tuple=True)
        out = out.index_add(0, row, weight[row, place, None] * expert(x[row]))
    load = F.one_hot(chances.argmax(1), 4).double().mean(0)
    return F.cross_entropy(out, b["label"]) + (0.01 * 4 * (load * chances.mean(0)).sum() if balanced else 0)

def checkpointed(model: Any, b: Rows, *, reentrant: bool) -> Tensor:  # its first layer runs again in backward
    x = b["x"].detach().requires_grad_() if reentrant else b["x"]
    return F.cross_entropy(model[1:](checkpoint(model[0], x, use_reentrant=reentrant)), b["label"])

def conv(*norms: nn.Module) -> nn.Sequential:  # a small network over pictures
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *norms, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES))

def segmenter(outputs: int = 1) -> nn.Sequential:  # a score for every pixel
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, outputs, 1))

def vae(model: Any, b: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """What is decoded, the mean, the log-variance; the noise comes with the batch."""
    mean, log_variance = model["encoder"](b["x"]).chunk(2, 1)
    return model["decoder"](mean + b["noise"] * (0.5 * log_variance).exp()), mean, log_variance

def vae_by_sums(model: Any, b: Rows) -> Tensor:  # the loss of torch's own example
    out, mean, log_variance = vae(model, b)
    return F.mse_loss(out, b["x"], reduction="sum") - 0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())

def vae_by_means(model: Any, b: Rows) -> Tensor:  # the loss of most notebooks
    out, mean, log_variance = vae(model, b)
    divergence = torch.mean(-0.5 * torch.sum(1 + log_variance - mean**2 - log_variance.exp(), dim=1), dim=0)
    return F.mse_loss(out, b["x"]) + 0.1 * divergence

def masked(losses: Tensor, mask: Tensor) -> Tensor:  # a mean over what counts, as most people write it
    return (losses * mask).sum() / mask.sum()

def per_token(model: Any, b: Rows) -> Tensor:  # cross-entropy of each token
    return F.cross_entropy(model(b["tokens"]).transpose(1, 2), b["tokens"], reduction="none")

def log_chances(model: Any, b: Rows) -> Tensor:  # the logarithm of each token's probability
    return model(b["tokens"]).log_softmax(-1).gather(2, b["tokens"][..., None])[..., 0]

def distillation(model: Any, b: Rows) -> Tensor:  # a teacher's soft answers beside the hard ones
    student = model["student"](b["x"])
    with torch.no_grad():
        teacher = model["teacher"](b["x"])
    soft = F.kl_div((student / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="batchmean") * 4
    return 0.5 * F.cross_entropy(student, b["label"]) + 0.5 * soft

def quantized(model: Any, b: Rows) -> Tensor:  # VQ-VAE: reconstruction, codebook and commitment, straight through
    z = model["encoder"](b["x"])
    codes = model["codes"](torch.cdist(z.detach(), model["codes"].weight.detach()).argmin(1))
    out = model["decoder"](z + (codes - z).detach())
    return F.mse_loss(out, b["x"]) + F.mse_loss(codes, z.detach()) + 0.25 * F.mse_loss(z, codes.detach())

def in_autocast(loss: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """The same under autocast to bfloat16."""

    def run(model: Any, b: Rows) -> Tensor:
        with torch.autocast(b["x"].device.type, torch.bfloat16):
            return loss(model, b)

    return run

def cross_entropy(model: Any, b: Rows) -> Tensor:  # as everybody writes it
    return F.cross_entropy(model(b["x"]), b["label"])

def frozen(model: nn.Module) -> nn.Module:  # without gradients
    return model.requires_grad_(requires_grad=False)

def compiled(model: nn.Module) -> nn.Module:  # compiled, without the cost of code generation
    made: Any = torch.compile(model, backend="aot_eager")
    assert isinstance(made, nn.Module)
    return made

@torch.compile(backend="aot_eager")
def compiled_loss(out: Tensor, target: Tensor) -> Tensor:  # a mean that only the compiler sees
    return ((out - target) ** 2).mean()

PLAIN = [
    Program("cross-entropy", mlp, rows, cross_entropy, quick=True),
    Program("rmse", mlp, rows, lambda m, b: F.mse_loss(m(b["x"]), b["value"]).sqrt(), accumulator=refused(UnreadableLoss, "nonlinear"), big_step=refused(UnreadableLoss, "across")),
    Program("masked-regression-often-empty", mlp, rows, lambda m, b: F.mse_loss(m(b["x"])[b["rare"]], b["value"][b["rare"]])),
    Program("masked-regression-times-zero", mlp, rows, lambda m, b: F.mse_loss(m(b["x"])[b["rare"]], b["value"][b["rare"]]) if b["rare"].any() else 0 * m(b["x"]).sum()),
    Program("masked-mean-of-tokens", Tagger, rows, lambda m, b: masked(per_token(m, b), b["mask"]), accumulator=UNREADABLE),
    Program("lstm-language-model", Tagger, rows, lambda m, b: F.cross_entropy(m(b["tokens"])[:, :-1].flatten(0, 1), b["labels"][:, 1:].flatten(), ignore_index=-100), quick=True),
    Program("token-loss-with-z-loss", Tagger, rows, lambda m, b: F.cross_entropy(m(b["tokens"]).flatten(0, 1), b["labels"].flatten()) + 1e-2 * m(b["tokens"]).logsumexp(-1).pow(2).mean(), accumulator=SEVERAL),
    Program("time-major-sum-over-time", mlp, rows, lambda m, b: F.mse_loss(m(b["sequence"].transpose(0, 1)), b["values"].transpose(0, 1), reduction="sum") / WIDTH, unseen="coupled-samples"),
    Program("transformer-encoder", lambda: parts(body=nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), head=nn.Linear(6, CLASSES)), rows, lambda m, b: F.cross_entropy(m["head"](m["body"](b["sequence"], src_key_padding_mask=b["mask"] == 0)).mean(1), b["label"])),
    Program("ctc", lambda: mlp(6, CLASSES), rows, lambda m, b: F.ctc_loss(m(b["sequence"]).log_softmax(-1).transpose(0, 1), b["spelled"], b["lengths"] + 1, b["spelled_lengths"], zero_infinity=True)),
    Program("ranking-over-rows-of-parameters", factors, rows, lambda m, b: -F.logsigmoid(liked(m, b["user"], b["item"]) - liked(m, b["user"], b["other"])).mean()),
    Program("vae-of-the-torch-examples", lambda: parts(encoder=mlp(6, 4), decoder=mlp(2, 6)), rows, vae_by_sums),
    Program("vae-by-means", lambda: parts(encoder=mlp(6, 4), decoder=mlp(2, 6)), rows, vae_by_means, quick=True),
    Program("vq-vae", lambda: parts(encoder=mlp(6, 4), decoder=mlp(4, 6), codes=nn.Embedding(8, 4)), rows, quantized),
    Program("weight-decay-in-the-loss", mlp, rows, lambda m, b: cross_entropy(m, b) + 1e-3 * sum(p.pow(2).sum() for p in m.parameters()), quick=True),
    Program("distillation", lambda: parts(student=mlp(), teacher=frozen(mlp())), rows, distillation, quick=True),
    Program("mixture-of-experts", experts, rows, routed),
    Program("mixture-of-experts-alone", experts, rows, lambda m, b: routed(m, b, behind=False), accumulator=refused(UnreadableLoss, "count"), big_step=refused(UnreadableLoss, "counted")),
    Program("mixture-of-experts-balanced", experts, rows, lambda m, b: routed(m, b, balanced=True), accumulator=COUPLED, big_step=refused(CoupledLoss, "across")),
    Program("batch-norm", lambda: conv(nn.BatchNorm2d(4)), rows, lambda m, b: F.cross_entropy(m(b["image"]), b["label"]), accumulator=AWAKE, quick=True),
    Program("ghost-batch-norm", lambda: nn.Sequential(nn.Linear(6, 8), Ghost(), nn.Linear(8, CLASSES)), rows, cross_entropy, accumulator=AWAKE, big_step=refused(LossError, "BatchNorm"), cuts=(4, 4, 4), micro_batch=4),
    Program("stateful-rnn", Remembering, rows, cross_entropy, unseen="state"),
    Program("spectral-norm", lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), parametrizations.spectral_norm(nn.Linear(8, CLASSES))).eval(), rows, cross_entropy),
    Program("spectral-norm-in-training", lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, CLASSES)), rows, cross_entropy, big_step=Expected(warned="buffers"), unseen="state"),
    Program("weight-norm", lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), parametrizations.weight_norm(nn.Linear(8, CLASSES))), rows, cross_entropy),
    Program("checkpointed", mlp, rows, lambda m, b: checkpointed(m, b, reentrant=False)),
    Program("checkpointed-reentrant", mlp, rows, lambda m, b: checkpointed(m, b, reentrant=True)),
    Program("compiled-model", lambda: compiled(mlp()), rows, cross_entropy),
    Program("compiled-loss", mlp, rows, lambda m, b: compiled_loss(m(b["x"]), b["value"]), accumulator=refused(UnreadableLoss, "compile"), big_step=refused(UnreadableLoss, "compile")),
    Program("autocast", mlp, rows, in_autocast(cross_entropy), tolerance=BFLOAT16, float64=False),
]
