"""Sequences of unequal length: what it gains to choose which of them share a micro-batch.

The batch arrives as loaders make it, right-padded to the longest of its sequences. The hand loop cuts it into random
micro-batches and trims each to its own longest sequence (`per micro-batch`) or leaves it as it came (`per batch`). Its
micro-batches lie ready on the device, cut outside the timed region; bigbatch gets the whole batch in host memory, and
finds lengths, sorts, packs, trims and moves inside it.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.gpu_figures import OURS, Bar, Figure, figure
from benchmarks.gpu_ours import big_step
from benchmarks.gpu_scale import Scale
from benchmarks.racing import Build, Contestant, Outcome, race, try_alone
from benchmarks.ragged import IGNORED, log_normal_lengths, padded, padding_share, sequences
from benchmarks.workloads import adamw

NAME = "packing"
PLANNING = "hand loop, padded per micro-batch"  # with torch's first choice of attention, which plans for every shape
BAR = Bar(3.0, 4.0, below=False, peak_ratio=1.05)
WARM_UP = 20  # rounds, each with shapes of its own: kernels are chosen, memory is asked for, graphs are captured
SAME_LOSS = 1e-3  # of the first update, from the same weights


@dataclass(frozen=True)
class RaggedBatch:
    """Sequences and what they should say, still of unequal length."""

    tokens: list[Tensor]
    labels: list[Tensor]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [len(row) for row in self.tokens]

    def table(self, chosen: list[int], width: int | None = None) -> dict[str, Tensor]:
        """Right-pad some of the sequences to the longest of them, or to `width`; padding has no label."""
        tokens, labels = [self.tokens[i] for i in chosen], [self.labels[i] for i in chosen]
        return {"tokens": padded(tokens, 0, width), "labels": padded(labels, IGNORED, width)}


def ragged_batches(scale: Scale, number: int) -> list[RaggedBatch]:
    """Make batches of the same mean length, each with its own sequences."""
    shape = scale.ragged
    found = []
    for seed in range(number):
        lengths = log_normal_lengths(shape.samples, shape.mean, shape.longest, seed)
        tokens, labels = (sequences(lengths, scale.vocabulary, 1000 * kind + seed) for kind in (1, 2))
        found.append(RaggedBatch(tokens, labels))
    return found


def random_micro_batches(batch: RaggedBatch, size: int) -> list[list[int]]:
    """Sequences come in random order already, so a loader's micro-batches are consecutive ones."""
    samples = range(len(batch.tokens))
    return [list(samples[start : start + size]) for start in range(0, len(samples), size)]


def token_loss(scale: Scale, model: nn.Module, batch: dict[str, Tensor], reduction: str) -> Tensor:
    """Return the cross-entropy of tokens that have a label."""
    with torch.autocast(scale.device, dtype=torch.bfloat16):
        logits = model(batch["tokens"]).flatten(0, 1)
        return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=IGNORED, reduction=reduction)


def hand_loop(scale: Scale, batches: list[RaggedBatch], *, per_batch: bool, cudnn: bool = False) -> Build:
    """Tuned, and right: each micro-batch's sum over the tokens of the whole batch.

    cuDNN's attention, torch's first choice on this device, plans 0.1 s for every new shape; a tuned loop over ragged
    micro-batches leaves it out.
    """
    width = scale.ragged.longest if per_batch else None
    tables = [
        [
            {key: value.to(scale.device) for key, value in batch.table(chosen, width).items()}
            for chosen in random_micro_batches(batch, scale.micro_batch)
        ]
        for batch in batches
    ]
    totals = [sum(batch.lengths) for batch in batches]

    def build() -> Contestant:
        model, optimizer = fresh(scale)
        parameters = list(model.parameters())

        def update(number: int) -> Tensor:
            torch.backends.cuda.enable_cudnn_sdp(enabled=cudnn)
            try:
                return trained(number)
            finally:
                torch.backends.cuda.enable_cudnn_sdp(enabled=True)

        def trained(number: int) -> Tensor:
            place = number % len(batches)
            losses = []
            for table in tables[place]:
                loss = token_loss(scale, model, table, "sum") / totals[place]
                loss.backward()
                losses.append(loss.detach())
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return torch.stack(losses).sum()

        return Contestant(model, update, note=note)

    def note() -> str:
        lengths = batches[0].lengths
        through = [[lengths[i] for i in chosen] for chosen in random_micro_batches(batches[0], scale.micro_batch)]
        return f"{len(through)} micro-batches, {padding_share(through, width):.0%} padding"

    return build


def ours(scale: Scale, batches: list[RaggedBatch], *, cuda_graph: bool) -> Contestant:
    """The whole batch, right-padded, in host memory."""
    model, optimizer = fresh(scale)
    tables = [batch.table(list(range(scale.ragged.samples)), scale.ragged.longest) for batch in batches]
    if scale.device.startswith("cuda"):
        tables = [{key: value.pin_memory() for key, value in table.items()} for table in tables]
    return big_step(
        model,
        optimizer,
        lambda model, batch: token_loss(scale, model, batch, "mean"),
        tables,
        options={
            "lengths": lambda batch: (batch["labels"] != IGNORED).sum(dim=1),
            "token_budget": scale.token_budget,
            "cuda_graph": cuda_graph,
        },
    )


def fresh(scale: Scale) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the same model for everyone, and its optimizer."""
    torch.manual_seed(1)
    model = scale.gpt()
    return model, adamw(model)


def contestants(scale: Scale, batches: list[RaggedBatch]) -> dict[str, Build]:
    """The first is what the others are compared with."""
    return {
        "hand loop, padded per batch": hand_loop(scale, batches, per_batch=True, cudnn=True),
        PLANNING: hand_loop(scale, batches, per_batch=False, cudnn=True),
        "the same without cuDNN's attention": hand_loop(scale, batches, per_batch=False),
        "bigbatch, packed": partial(ours, scale, batches, cuda_graph=False),
        "bigbatch, packed, CUDA graph": partial(ours, scale, batches, cuda_graph=True),
    }


def measure(scale: Scale, *, rounds: int, seconds: float) -> list[Figure]:
    """Every round has a batch of its own, the same for all: nobody may remember the last one's lengths."""
    batches = ragged_batches(scale, rounds + WARM_UP)
    builds = contestants(scale, batches)
    outcomes = {name: Outcome() for name in builds}
    hand = next(iter(outcomes.values()))
    try_alone(next(iter(builds.values())), scale.device, Outcome())
    for name, build in builds.items():
        try_alone(build, scale.device, outcomes[name], updates=3)
        same_loss(outcomes[name], hand.loss)
    slow = {PLANNING: builds.pop(PLANNING)}  # ten times as long: some rounds of its own tell enough
    race(slow, outcomes, scale.device, rounds=3, warm_up=1, seconds=seconds)
    race(builds, outcomes, scale.device, rounds=rounds, warm_up=WARM_UP, seconds=seconds)
    return [
        figure(NAME, name, outcome, faster(outcome, hand), hand=hand, bar=BAR if name.startswith(OURS) else None)
        for name, outcome in outcomes.items()
    ]


def faster(outcome: Outcome, other: Outcome) -> float | None:
    """Return how many times faster it is than the other."""
    ratio = outcome.ratio_to(other)
    return None if ratio is None else 1 / ratio


def same_loss(outcome: Outcome, truth: float | None, tolerance: float = SAME_LOSS) -> None:
    """Fail whoever has another loss on the first batch, from the same weights."""
    found = outcome.loss
    if truth is not None and found is not None and not abs(found - truth) <= tolerance * abs(truth):
        outcome.error = f"its first loss is {found:.4f}, the hand loop's {truth:.4f}"
