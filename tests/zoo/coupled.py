# ruff: noqa: E501, D103, I001 - a row of a table is a line
# fmt: off
"""Losses in which samples may meet: contrastive, metric, segmentation, reinforcement learning, adversarial, graphs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import across, counted
from bigbatch.errors import CoupledLoss, UnreadableLoss
from tests.zoo.plain import Tagger, frozen, log_chances, masked, segmenter
from tests.zoo.program import Expected, Program, refused, Rows
from tests.zoo.samples import CLASSES, graphs, join_graphs, mlp, parts, rows

COUPLED = refused(CoupledLoss, "across")
TOLD = refused(UnreadableLoss, "count")  # no graph says it: counted(...) settles it
UNREADABLE = refused(UnreadableLoss, "")
MEETS = refused(CoupledLoss, "BigStep")  # `across` in an Accumulator

def both(expected: Expected) -> dict[str, Any]:  # the same of either entrance
    return {"accumulator": expected, "big_step": expected}

def pooled(model: Any, b: Rows, *, mean: bool = False) -> Tensor:
    """Messages along edges, added up to nodes, and nodes to graphs: one number per graph."""
    x = model["embed"](b["x"]).tanh()
    source, target = b["edges"]
    x = x + torch.zeros_like(x).index_add(0, target, model["message"](x[source])).tanh()
    whole = x.new_zeros(b["graphs"], 8).index_add(0, b["batch"], x)
    if mean:
        whole = whole / torch.bincount(b["batch"], minlength=b["graphs"])[:, None]
    return F.mse_loss(model["head"](whole)[:, 0], b["y"])

def energies(model: Any, b: Rows) -> Tensor:  # the sum over nodes comes last, as in SchNet
    each = model["head"](model["embed"](b["x"]).tanh())[:, 0]
    return F.l1_loss(each.new_zeros(b["graphs"]).scatter_add(0, b["batch"], each), b["y"])

def network() -> nn.Module:  # of graphs
    return parts(embed=nn.Linear(6, 8), message=nn.Linear(8, 8), head=nn.Linear(8, 1))

def normalized(model: Any, x: Tensor) -> Tensor:  # embeddings of length 1
    return F.normalize(model(x), dim=1)

def info_nce(ours: Tensor, theirs: Tensor, offset: int = 0) -> Tensor:  # each of ours finds its own among theirs
    return F.cross_entropy(ours @ theirs.T / 0.1, offset + torch.arange(len(ours), device=ours.device))

def clip(model: Any, b: Rows) -> Tensor:  # both directions over the micro-batch's own
    image, text = normalized(model["image"], b["x"]), normalized(model["text"], b["x2"])
    return (info_nce(image, text) + info_nce(text, image)) / 2

def clip_across(model: Any, b: Rows) -> Tensor:  # the same over all
    image, text = normalized(model["image"], b["x"]), normalized(model["text"], b["x2"])
    return (info_nce(image, across.gather(text), across.offset()) + info_nce(text, across.gather(image), across.offset())) / 2

def dino(model: Any, b: Rows) -> Tensor:  # a teacher's answers, centred by the batch without gradient
    with torch.no_grad():
        teacher = model["target"](b["x2"])
        teacher = ((teacher - teacher.mean(0)) / 0.1).softmax(1)
    return -(teacher * (model["online"](b["x"]) / 0.2).log_softmax(1)).sum(1).mean()

def ppo(advantage: Any) -> Any:  # the clipped objective with a value and an entropy term

    def loss(model: Any, b: Rows) -> Tensor:
        scores, value = model["policy"](b["x"]).log_softmax(1), model["value"](b["x"])[:, 0]
        ratio = (scores.gather(1, b["label"][:, None])[:, 0] - b["noise"][:, 0] + 1).exp()
        gain = advantage(b["advantage"])
        policy = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        entropy = -(scores.exp() * scores).sum(1).mean()
        return policy + 0.5 * F.mse_loss(value, b["weight"]) - 0.01 * entropy

    return loss

def dpo_joined(model: Any, b: Rows) -> Tensor:  # as TRL does it: both answers in one forward, then cut in two
    tokens, mask = torch.cat([b["tokens"], b["tokens"].flip(1)]), torch.cat([b["mask"], b["mask"].flip(1)])
    chosen, rejected = (log_chances(model, {"tokens": tokens}) * mask).sum(1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected - b["advantage"])).mean()

def grpo(model: Any, b: Rows) -> Tensor:
    """Groups of answers with their advantages, a mean over the tokens of each answer."""
    now = log_chances(model, b)
    ratio = (now - now.detach()).exp()
    gain = b["value"] - b["value"].mean(1, keepdim=True)  # a group belongs to one prompt
    each = -torch.min(ratio * gain[:, :1], ratio.clamp(0.8, 1.2) * gain[:, :1])
    return ((each * b["mask"]).sum(1) / b["mask"].sum(1)).mean()

def tokens_and_advantages(model: Any, b: Rows) -> Tensor:
    """A mean over tokens, and one over sequences with advantages that the batch normalizes."""
    scores = model(b["tokens"])
    gain = (b["advantage"] - b["advantage"].mean()) / b["advantage"].std()
    return F.cross_entropy(scores.flatten(0, 1), b["labels"].flatten()) - (log_chances(model, b).sum(1) * gain).mean()

def soft_dice(model: Any, b: Rows, dims: tuple[int, ...] = (0, 1, 2, 3)) -> Tensor:  # dice's loss over these dimensions
    p, t = model(b["small"]).sigmoid(), b["shape"]
    return 1 - ((2 * (p * t).sum(dims) + 1) / (p.sum(dims) + t.sum(dims) + 1)).mean()

def soft_dice_across(model: Any, b: Rows) -> Tensor:  # the same over all micro-batches
    p, t = model(b["small"]).sigmoid(), b["shape"]
    return 1 - (2 * across.sum((p * t).sum()) + 1) / (across.sum(p.sum()) + across.sum(t.sum()) + 1)

def detection(model: Any, b: Rows) -> Tensor:  # sums over positives, divided by their number in the batch
    out = model(b["small"])
    loss = F.binary_cross_entropy_with_logits(out, b["shape"], reduction="none")
    return loss.sum() / b["shape"].sum().clamp(min=1)

def class_weights_of_the_batch(model: Any, b: Rows) -> Tensor:  # weights from how often each class comes in the batch
    often = torch.bincount(b["label"], minlength=CLASSES).clamp(min=1)
    return F.cross_entropy(model(b["x"]), b["label"], weight=(len(b["label"]) / often).to(b["x"].dtype))

def discriminator(model: Any, b: Rows) -> Tensor:  # real ones and made ones
    real, made = model["d"](b["x"]), model["d"](model["g"](b["noise"]).detach())
    return F.binary_cross_entropy_with_logits(real, torch.ones_like(real)) + F.binary_cross_entropy_with_logits(made, torch.zeros_like(made))

def generator(model: Any, b: Rows) -> Tensor:  # what the discriminator takes for real
    made = model["d"](model["g"](b["noise"]))
    return F.binary_cross_entropy_with_logits(made, torch.ones_like(made))

def towers() -> nn.Module:  # two of them
    return parts(image=mlp(), text=mlp())

def self_taught() -> nn.Module:  # a network, its predictor and its target
    return parts(online=mlp(), predictor=mlp(CLASSES), target=frozen(mlp()))

def players() -> nn.Module:  # a generator and a discriminator
    return parts(g=mlp(2, 6), d=mlp(6, 1))

def actor_critic() -> nn.Module:  # a policy and a value
    return parts(policy=mlp(), value=mlp(6, 1))

COUPLED_LOSSES = [
    Program("clip", towers, rows, clip, **both(COUPLED)),
    Program("clip-across", towers, rows, clip_across, accumulator=MEETS),
    Program("dino-centred-by-the-batch", self_taught, rows, dino, unseen="coupled-samples"),
    Program("top-k-loss", mlp, rows, lambda m, b: F.cross_entropy(m(b["x"]), b["label"], reduction="none").topk(2).values.mean(), **both(COUPLED), cuts=(3, 2, 3), micro_batch=3),
    Program("ppo-advantages-as-given", actor_critic, rows, ppo(lambda a: a)),
    Program("ppo-normalized-advantages", actor_critic, rows, ppo(lambda a: (a - a.mean()) / (a.std() + 1e-8)), unseen="coupled-samples"),
    Program("tokens-and-normalized-advantages", Tagger, rows, tokens_and_advantages, unseen="coupled-samples", cuts=(6, 6, 6), micro_batch=6),
    Program("dpo-joined", Tagger, rows, dpo_joined),
    Program("grpo", Tagger, rows, grpo),
    Program("dapo-over-all-tokens", Tagger, rows, lambda m, b: masked(-log_chances(m, b) * b["advantage"][:, None], b["mask"]), accumulator=refused(UnreadableLoss, "count")),
    Program("class-weights-of-the-batch", mlp, rows, class_weights_of_the_batch, unseen="coupled-samples"),
    Program("weights-normalized-by-the-batch", mlp, rows, lambda m, b: (F.cross_entropy(m(b["x"]), b["label"], reduction="none") * (b["weight"] / b["weight"].sum())).sum(), unseen="coupled-samples"),
    Program("soft-dice-per-picture", segmenter, rows, lambda m, b: soft_dice(m, b, (1, 2, 3))),
    Program("soft-dice-across", segmenter, rows, soft_dice_across, accumulator=MEETS),
    Program("detection-over-positives", segmenter, rows, detection, accumulator=TOLD, big_step=TOLD),
    Program("gan", players, rows, {"d": discriminator, "g": generator}, quick=True),
    Program("graph-regression", network, graphs, pooled, collate=join_graphs),
    Program("graph-regression-mean-pool", network, graphs, lambda m, b: pooled(m, b, mean=True), collate=join_graphs),
    Program("graph-energies-of-nodes", network, graphs, energies, collate=join_graphs, **both(TOLD)),
    Program("graph-energies-of-nodes, told", network, graphs, lambda m, b: counted(energies(m, b), len(b["y"])), collate=join_graphs),
]
