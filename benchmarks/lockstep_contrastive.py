"""A contrastive loss over the whole batch, beside GradCache's two passes and the wrong loss of each micro-batch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu_figures import Bar
from benchmarks.gpu_ours import big_step
from benchmarks.lockstep_losses import clip, plain_clip
from benchmarks.lockstep_networks import TwoTowers, seeded
from benchmarks.lockstep_racing import Entry, Raced, raced
from benchmarks.lockstep_scale import FEW, Pairs, Scale
from benchmarks.lockstep_truth import Activations, Batch, Case, distance
from benchmarks.racing import Contestant
from benchmarks.report import Grid

WRONG = "plain (wrong)"  # a loss for each micro-batch
CACHED = "GradCache by hand"
BAR = Bar(1.0, peak_ratio=1.1)  # times GradCache; the wrong loop's peak is that of one micro-batch


def loss_of(model: Any, batch: Batch) -> Tensor:
    """Return CLIP's loss, over all micro-batches where there are several."""
    return clip(*model(batch["images"], batch["texts"]))


def loss_and_outputs(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return it with the embeddings."""
    images, texts, scale = model(batch["images"], batch["texts"])
    return clip(images, texts, scale), torch.cat([images, texts], dim=1)


def pairs(size: Pairs, device: str) -> Batch:
    """Random ones, on the device."""
    torch.manual_seed(0)
    return {
        "images": torch.randn(size.samples, 3, size.pixels, size.pixels, device=device),
        "texts": torch.randint(size.vocabulary, (size.samples, size.tokens), device=device),
    }


@dataclass(frozen=True)
class Work:
    """The two towers and their batch, whole and cut."""

    size: Pairs
    device: str
    batch: Batch

    @property
    def pieces(self) -> list[Batch]:
        """Micro-batches."""
        parts = {name: values.split(self.size.micro_batch) for name, values in self.batch.items()}
        number = len(parts["images"])
        return [{name: values[place] for name, values in parts.items()} for place in range(number)]

    def fresh(self) -> tuple[TwoTowers, torch.optim.Optimizer]:
        """Return the same model for everyone, and its optimizer."""
        model = seeded(partial(TwoTowers, self.size), self.device)
        assert isinstance(model, TwoTowers)  # noqa: S101 - a checker cannot know
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def hand_loop(self, pieces: list[Batch]) -> Contestant:
        """Tuned; with the whole batch as its only piece it is right."""
        model, optimizer = self.fresh()
        parameters = list(model.parameters())

        def update(_: int) -> Tensor:
            losses = []
            for piece in pieces:
                loss = plain_clip(*model(piece["images"], piece["texts"])) / len(pieces)
                loss.backward()
                losses.append(loss.detach())
            _stepped(parameters, optimizer)
            return torch.stack(losses).sum()

        return Contestant(model, update)

    def grad_cache(self) -> Contestant:
        """Embed all without a graph, take the loss's gradient to the embeddings, and send it down piece by piece."""
        model, optimizer = self.fresh()
        parameters, pieces = list(model.parameters()), self.pieces

        def update(_: int) -> Tensor:
            with torch.no_grad():
                found = [model(piece["images"], piece["texts"])[:2] for piece in pieces]
            images, texts = (torch.cat(rows).requires_grad_() for rows in zip(*found, strict=True))
            loss = plain_clip(images, texts, model.scale())
            loss.backward()
            cached = zip(_gradients(images, pieces), _gradients(texts, pieces), strict=True)
            for piece, gradients in zip(pieces, cached, strict=True):
                embedded = model(piece["images"], piece["texts"])[:2]
                torch.autograd.backward(embedded, gradients)
            _stepped(parameters, optimizer)
            return loss.detach()

        return Contestant(model, update)

    def ours(self, activations: Activations, *, graph: bool = False) -> Contestant:
        """BigStep at the same micro-batch."""
        model, optimizer = self.fresh()
        return big_step(
            model,
            optimizer,
            loss_of,
            [self.batch],
            micro_batch_size=self.size.micro_batch,
            options={"activations": activations, "cuda_graph": graph},
        )


def _gradients(embeddings: Tensor, pieces: list[Batch]) -> tuple[Tensor, ...]:
    assert embeddings.grad is not None  # noqa: S101 - backward has just been there
    return embeddings.grad.split([len(piece["images"]) for piece in pieces])


def _stepped(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def wide_entries(scale: Scale) -> dict[str, Entry]:
    """Those that a bar is about, with large towers."""
    work = Work(scale.wide_pairs, scale.device, pairs(scale.wide_pairs, scale.device))
    return {
        WRONG: Entry(partial(work.hand_loop, work.pieces), CACHED, peak_beside=WRONG),
        CACHED: Entry(work.grad_cache, CACHED, peak_beside=WRONG),
        "bigbatch recompute": Entry(partial(work.ours, "recompute"), CACHED, BAR, peak_beside=WRONG),
    }


def entries(scale: Scale) -> dict[str, Entry]:
    """Everyone; GradCache's figures are what ours are compared with, but for the peak."""
    size = scale.pairs
    work = Work(size, scale.device, pairs(size, scale.device))
    small_size = replace(size, samples=scale.small_pairs)
    small = Case(
        lambda: seeded(partial(TwoTowers, small_size), scale.device), pairs(small_size, scale.device), loss_and_outputs
    )
    micro = scale.small_pairs // FEW

    def error_of_wrong() -> float:
        return distance(small.accumulated(micro, torch.float32), small.truth).gradient

    def error_of_full() -> float:
        return distance(small.full(torch.float32), small.truth).gradient

    def error_of_ours(activations: Activations) -> float:
        return distance(small.ours(micro, torch.float32, activations), small.truth).gradient

    replayed = Entry(partial(work.ours, "recompute", graph=True), CACHED, BAR, peak_beside=WRONG)
    return {
        WRONG: Entry(partial(work.hand_loop, work.pieces), CACHED, error=error_of_wrong, peak_beside=WRONG),
        CACHED: Entry(work.grad_cache, CACHED, peak_beside=WRONG),
        "one full batch": Entry(partial(work.hand_loop, [work.batch]), CACHED, error=error_of_full, peak_beside=WRONG),
        "bigbatch recompute": Entry(
            partial(work.ours, "recompute"), CACHED, BAR, partial(error_of_ours, "recompute"), peak_beside=WRONG
        ),
        "bigbatch keep": Entry(
            partial(work.ours, "keep"), CACHED, error=partial(error_of_ours, "keep"), peak_beside=WRONG
        ),
        **({"bigbatch recompute, graph": replayed} if scale.device.startswith("cuda") else {}),
    }


def measure(scale: Scale, *, rounds: int, end: float) -> Iterator[tuple[Grid, list[Raced]]]:
    """Yield the table of small towers, which hosts can hardly launch fast enough."""
    yield from _raced("small CLIP-like", scale.pairs, entries(scale), scale, rounds=rounds, end=end)


def measure_wide(scale: Scale, *, rounds: int, end: float) -> Iterator[tuple[Grid, list[Raced]]]:
    """Yield the table of large ones."""
    yield from _raced("large CLIP-like", scale.wide_pairs, wide_entries(scale), scale, rounds=rounds, end=end)


def _raced(
    name: str, size: Pairs, found: dict[str, Entry], scale: Scale, *, rounds: int, end: float
) -> Iterator[tuple[Grid, list[Raced]]]:
    towers = f"{name} towers ({size.layers} layers, {size.width} wide)"
    title = f"{towers}: {size.samples:,} pairs in micro-batches of {size.micro_batch}, float32"
    header = ("× GradCache", "/ plain's")
    yield from raced(name, title, found, scale.device, rounds=rounds, end=end, header=header)
