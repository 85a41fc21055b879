# ruff: noqa: E501, D103, I001 - a row of a table is a line
# fmt: off
"""Losses of everyday programs: several heads and tasks, pictures, structures, distributions, inner loops."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import across, counted
from bigbatch.errors import CoupledLoss, LossError, SeveralCounts, UnreadableLoss
from tests.zoo.plain import Tagger, conv
from tests.zoo.program import Program, refused, Rows
from tests.zoo.samples import CLASSES, WIDTH, WORDS, mlp, parts, rows

COUPLED = refused(CoupledLoss, "across")
COUNT = refused(UnreadableLoss, "count")
LOOP = refused(LossError, "count")  # a loop over samples looks like several terms; a count settles it
SEVERAL = refused(SeveralCounts, "counts=")

def tasks(model: Any, b: Rows) -> Tensor:  # each sample belongs to one of two tasks
    out, first = model(b["x"]), b["binary"] == 1
    return F.cross_entropy(out[first], b["label"][first]) + F.mse_loss(out[~first], b["value"][~first])

def crf(model: Any, b: Rows) -> Tensor:  # a linear chain: the forward algorithm with padding
    scores, change, mask = model["net"](b["sequence"]), model["change"].weight, b["mask"] > 0
    index = torch.arange(len(scores), device=scores.device)
    path, total = scores[index, 0, b["classes"][:, 0]], scores[:, 0]
    for t in range(1, WIDTH):
        step = scores[index, t, b["classes"][:, t]] + change[b["classes"][:, t - 1], b["classes"][:, t]]
        path = path + step * mask[:, t]
        total = torch.where(mask[:, t, None], torch.logsumexp(total[:, :, None] + change + scores[:, t, None], 1), total)
    return (total.logsumexp(1) - path).mean()

def one_by_one(model: Any, b: Rows) -> Tensor:  # a loop over samples of different length
    return torch.stack([F.mse_loss(model(x[:n]), y[:n]) for x, y, n in zip(b["sequence"], b["values"], b["lengths"].tolist(), strict=True)]).mean()

def soft_dtw(model: Any, b: Rows) -> Tensor:  # alignment of two sequences by dynamic programming
    cost = (model(b["sequence"])[:, :, None] - b["values"][:, None]).pow(2).sum(-1)
    far = torch.full_like(cost[:, 0, 0], 1e3)
    table = {(0, 0): torch.zeros_like(far)}
    for i in range(1, 4):
        for j in range(1, 4):
            before = torch.stack([table.get((i - 1, j), far), table.get((i, j - 1), far), table.get((i - 1, j - 1), far)], -1)
            table[i, j] = cost[:, i - 1, j - 1] - torch.logsumexp(-before, -1)
    return table[3, 3].mean()

def slope_of_a_mean(model: Any, b: Rows, *, mean: bool = False) -> Tensor:
    """A penalty on the derivative of the mean loss, which shrinks with the batch."""
    x = b["x"].clone().requires_grad_()
    loss = F.mse_loss(model(x), b["value"])
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + (50 * slope.pow(2).sum(1).mean() if mean else slope.pow(2).sum())

def weighed_by_hand(model: Any, b: Rows) -> Tensor:  # a weighted mean
    loss = (model(b["x"]) - b["value"]).pow(2).mean(1)
    return (b["weight"] * loss).sum() / b["weight"].sum()

def smoothed_by_hand(model: Any, b: Rows) -> Tensor:
    """Label smoothing by KL divergence, as in the annotated transformer: a sum over tokens that count."""
    scores = model(b["tokens"]).log_softmax(-1).flatten(0, 1)
    target = torch.full_like(scores, 0.1 / (WORDS - 2)).scatter_(1, b["tokens"].flatten()[:, None], 0.9)
    target = target.masked_fill(b["tokens"].flatten()[:, None] == 0, 0.0)
    return F.kl_div(scores, target, reduction="sum") / (b["tokens"] != 0).sum()

def said(model: Any, b: Rows) -> Tensor:  # the same, with its count told
    return counted(smoothed_by_hand(model, b), (b["tokens"] != 0).sum())

def rmse_across(model: Any, b: Rows) -> Tensor:  # the root of the mean over all
    return across.mean(F.mse_loss(model(b["x"]), b["value"])).sqrt()

def supcon_across(model: Any, b: Rows) -> Tensor:  # rows of one's own beside those of all
    z = F.normalize(model(b["x"]), dim=1)
    every, labels = across.gather(z), across.gather(b["label"])
    own = across.offset() + torch.arange(len(z), device=z.device)
    other = torch.arange(len(every), device=z.device) != own[:, None]
    chance = (z @ every.T / 0.5).masked_fill(~other, -1e9).log_softmax(1)
    same = (labels == b["label"][:, None]) & other
    return -((chance * same).sum(1) / same.sum(1).clamp(min=1)).mean()

EVERYDAY = [
    Program("two-tasks-by-sample", mlp, rows, tasks, accumulator=SEVERAL),
    Program("weighted-mean-by-hand", mlp, rows, weighed_by_hand, accumulator=COUNT),
    Program("crf", lambda: parts(net=mlp(), change=nn.Linear(CLASSES, CLASSES)), rows, crf),
    Program("smoothed-kl-over-tokens", Tagger, rows, smoothed_by_hand, accumulator=COUNT, big_step=COUNT),
    Program("smoothed-kl-counted", Tagger, rows, said),
    Program("soft-dtw", mlp, rows, soft_dtw),
    Program("one-sample-after-the-other", mlp, rows, one_by_one, accumulator=LOOP, big_step=LOOP),
    Program("one-sample-after-the-other-one-by-one", mlp, rows, one_by_one, accumulator=LOOP, big_step=LOOP, cuts=(1, 1, 1, 1), micro_batch=1),
    Program("slope-of-a-mean", mlp, rows, slope_of_a_mean, accumulator=refused(CoupledLoss, "sum"), big_step=refused(CoupledLoss, "sum")),
    Program("instance-norm-with-statistics", lambda: conv(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), rows, lambda m, b: F.cross_entropy(m(b["image"]), b["label"]), buffers=False),
    Program("rmse-across", mlp, rows, rmse_across, accumulator=refused(CoupledLoss, "BigStep")),
    Program("supcon-across", mlp, rows, supcon_across, accumulator=refused(CoupledLoss, "BigStep")),
]
