"""Losses of a whole batch, written once: inside `BigStep` over all micro-batches, elsewhere over what is there."""

import torch
from torch import Tensor
from torch.nn import functional as F

from bigbatch import across


def clip(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """Each image finds its text among all, and each text its image; embeddings have length 1."""
    all_images, all_texts = across.gather(images), across.gather(texts)
    mine = across.offset() + torch.arange(len(images), device=images.device)
    rows = F.cross_entropy(scale * images @ all_texts.T, mine)
    columns = F.cross_entropy(scale * texts @ all_images.T, mine)
    return (rows + columns) / 2


def plain_clip(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """Return the same as a hand loop has it: one product for both directions."""
    products = scale * images @ texts.T
    mine = torch.arange(len(images), device=images.device)
    return (F.cross_entropy(products, mine) + F.cross_entropy(products.T, mine)) / 2


def barlow_twins(one: Tensor, other: Tensor) -> Tensor:
    """Features of two views should correlate with themselves and with no other."""
    correlation = across.mean(_standardised(one).T @ _standardised(other) / len(one))
    wanted = torch.eye(len(correlation), dtype=one.dtype, device=one.device)
    weights = wanted + 0.005 * (1 - wanted)
    return across.once(((correlation - wanted).square() * weights).sum())


def vicreg(one: Tensor, other: Tensor) -> Tensor:
    """Views alike (a mean over samples), features that vary, and that do so each by itself (of the whole batch)."""
    spread = sum((_variance_term(view) + _covariance_term(view) for view in (one, other)), start=one.new_zeros(()))
    return 25.0 * F.mse_loss(one, other) + across.once(spread)


def _centred(x: Tensor) -> Tensor:
    return x - across.mean(x.mean(0))


def _standardised(x: Tensor) -> Tensor:
    centred = _centred(x)
    return centred / (across.mean(centred.square().mean(0)) + 1e-5).sqrt()


def _variance_term(x: Tensor) -> Tensor:
    variance = across.mean(_centred(x).square().mean(0))
    return 25.0 * F.relu(1 - (variance + 1e-4).sqrt()).mean() / 2


def _covariance_term(x: Tensor) -> Tensor:
    centred = _centred(x)
    covariance = across.mean(centred.T @ centred / len(x))
    return (covariance - covariance.diag().diag()).square().sum() / x.shape[1]
