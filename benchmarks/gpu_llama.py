"""A billion parameters on a small card: LoRA, checkpointing and ragged sequences in a process capped at 24 GiB.

Every contestant trains the same model on the same sequences, 64 an update, with the same padding mask. Trainer gets
each of its settings in turn and its micro-batches padded to their own longest sequence; `grouped by length` is what
its sampler makes of 64 sequences: sorted. They do not fit beside each other, so each is timed alone: one update to
warm up, then the mean of the next ones.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.gpu_figures import OURS, Bar, Figure, figure
from benchmarks.gpu_ours import big_step
from benchmarks.gpu_packing import same_loss
from benchmarks.gpu_scale import Scale, in_bytes
from benchmarks.hf_trainer import Sample, trainer
from benchmarks.lora import adapters, llama_with_lora
from benchmarks.overhead import settle
from benchmarks.peak_memory import peak_bytes
from benchmarks.racing import Build, Contestant, Outcome, attempt, capped, release
from benchmarks.ragged import IGNORED, log_normal_lengths, padded, sequences

NAME = "llama"
BAR = Bar(1.8, 3.0, below=False)
UPDATES = 2  # timed ones; Trainer takes 4 to 20 seconds for each
SAME_LOSS = 5e-3  # bf16 weights, and other kernels for other shapes
SETTINGS = ((8, False), (8, True), (4, True), (4, False), (16, False), (2, False))  # the likely best first
ALL_SETTINGS = (*SETTINGS, (16, True), (1, False))


def made(scale: Scale) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and an optimizer of its adapters."""
    model = llama_with_lora(scale.llama, scale.device)
    return model, torch.optim.AdamW(adapters(model), lr=3e-4, fused=True)


def drawn(scale: Scale) -> list[list[Tensor]]:
    """Return the sequences of each update."""
    shape = scale.llama_ragged
    return [
        sequences(log_normal_lengths(shape.samples, shape.mean, shape.longest, seed), scale.llama.vocabulary, seed)
        for seed in range(1 + UPDATES)
    ]


def collated(rows: list[Tensor]) -> Sample:
    """Right-pad, as the library's own collators do: what is padding has neither attention nor a label."""
    mask = padded([torch.ones_like(row) for row in rows], 0)
    return {"input_ids": padded(rows, 0), "attention_mask": mask, "labels": padded(rows, IGNORED)}


def hf(scale: Scale, updates: list[list[Tensor]], size: int, *, grouped: bool) -> Contestant:
    """Trainer at one setting."""
    model, optimizer = made(scale)
    if grouped:
        updates = [sorted(rows, key=len, reverse=True) for rows in updates]
    return trainer(
        model,
        optimizer,
        [{"input_ids": row} for rows in updates for row in rows],
        micro_batch=size,
        steps=scale.llama_ragged.samples // size,
        device=scale.device,
        collate=lambda samples: collated([sample["input_ids"] for sample in samples]),
    )


def ours(scale: Scale, updates: list[list[Tensor]]) -> Contestant:
    """The whole batch, right-padded, in host memory; nothing is chosen by hand."""
    model, optimizer = made(scale)
    batches = [collated(rows) for rows in updates]
    if scale.device.startswith("cuda"):
        batches = [{key: value.pin_memory() for key, value in batch.items()} for batch in batches]

    def loss(model: nn.Module, batch: Sample) -> Tensor:
        with torch.autocast(scale.device, dtype=torch.bfloat16):
            return model(**batch).loss

    return big_step(
        model,
        optimizer,
        loss,
        batches,
        memory=scale.llama_budget,
        options={"lengths": "attention_mask", "token_budget": "auto"},
    )


def contestants(scale: Scale, *, every: bool) -> dict[str, Build]:
    """Ours first: where time runs out, it is the others' less likely settings that go without."""
    updates = drawn(scale)
    builds: dict[str, Build] = {"bigbatch, all automatic": partial(ours, scale, updates)}
    for size, grouped in ALL_SETTINGS if every else SETTINGS:
        name = f"HF Trainer at {size}" + (", grouped by length" if grouped else "")
        builds[name] = partial(hf, scale, updates, size, grouped=grouped)
    return builds


@dataclass(frozen=True)
class Clock:
    """When a part has to end."""

    end: float

    @property
    def over(self) -> bool:
        """Whether no other contestant should start."""
        return time.perf_counter() > self.end


def measure(scale: Scale, *, seconds: float, every: bool, say: Callable[[str], None] = lambda _: None) -> list[Figure]:
    """Time each alone under the cap."""
    builds = contestants(scale, every=every)
    outcomes = {name: Outcome() for name in builds}
    clock = Clock(time.perf_counter() + seconds)
    budget = in_bytes(scale.llama_budget)
    for name, build in builds.items():
        if clock.over:
            outcomes[name].error = "not run: out of time"
            continue
        with capped(budget, scale.device):
            _timed_alone(build, scale.device, outcomes[name])
        say(f"{name}: {outcomes[name].error or outcomes[name].note}")
    peers = [outcome for name, outcome in outcomes.items() if not name.startswith(OURS) and outcome.median]
    best = min(peers, key=lambda outcome: outcome.median or 0.0, default=Outcome())
    for outcome in outcomes.values():
        if not outcome.error:
            same_loss(outcome, best.loss, SAME_LOSS)
    bar = Bar(BAR.must, BAR.stretch, below=False, peak_bytes=budget)
    return [
        figure(NAME, name, outcome, _faster(outcome, best), bar=bar if name.startswith(OURS) else None)
        for name, outcome in outcomes.items()
    ]


def _timed_alone(build: Build, device: str, outcome: Outcome) -> None:
    def train() -> None:
        contestant = build()
        try:
            settle(device)
            start = time.perf_counter()
            loss = contestant.update(0)
            settle(device)
            first = time.perf_counter() - start
            outcome.loss = None if loss is None else float(loss)
            start = time.perf_counter()
            for number in range(1, 1 + UPDATES):
                contestant.update(number)
            settle(device)
            outcome.seconds = [(time.perf_counter() - start) / UPDATES]
            outcome.note = "; ".join(filter(None, (contestant.note(), f"first update {first:.1f} s")))
        finally:
            contestant.close()

    release()
    with attempt(outcome):
        _, outcome.peak = peak_bytes(train, device)
        if device.startswith("cuda"):
            outcome.reserved = torch.cuda.max_memory_reserved()
    release()


def _faster(outcome: Outcome, best: Outcome) -> float | None:
    ratio = outcome.ratio_to(best)
    return None if ratio is None else 1 / ratio
