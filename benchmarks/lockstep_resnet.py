"""BatchNorm: what it costs to have a window's micro-batches normalise as one batch, beside wrong accumulation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import lockstep_networks as networks
from benchmarks.gpu_figures import Bar
from benchmarks.gpu_ours import big_step
from benchmarks.lockstep_libraries import torchvision_models
from benchmarks.lockstep_racing import Entry, Raced, raced
from benchmarks.lockstep_scale import FEW, MANY, WIDTH, Images, Scale
from benchmarks.lockstep_truth import Activations, Batch, Case, distance
from benchmarks.racing import Contestant
from benchmarks.report import Grid

KEPT = Bar(1.15)
OFFLOADED = Bar(2.5, 1.6, peak_ratio=1.35)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def loss_and_outputs(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return it with the logits."""
    logits = model(batch["images"])
    return F.cross_entropy(logits, batch["labels"]), logits


def images(size: Images, device: str) -> Batch:
    """Random ones, on the device."""
    torch.manual_seed(0)
    pixels = torch.randn(size.samples, 3, size.pixels, size.pixels, device=device)
    return {"images": pixels, "labels": torch.randint(size.classes, (size.samples,), device=device)}


@dataclass(frozen=True)
class Work:
    """One network and its batch."""

    name: str
    network: Callable[[int], nn.Module]  # from a number of classes
    size: Images
    small: Images
    device: str
    offloads: tuple[int, ...]  # numbers of micro-batches that are offloaded, too

    @property
    def graphs(self) -> bool:
        """Whether windows can be captured."""
        return self.device.startswith("cuda")

    def fresh(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the same model for everyone, and its optimizer."""
        model = networks.seeded(partial(self.network, self.size.classes), self.device)
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    def hand_loop(self, batch: Batch, number: int) -> Contestant:
        """Tuned: gradients set to None, one division, no waiting for the device. Each micro-batch has its own norm."""
        model, optimizer = self.fresh()
        parameters = list(model.parameters())
        parts = {name: values.chunk(number) for name, values in batch.items()}
        pieces = [{name: values[place] for name, values in parts.items()} for place in range(number)]

        def update(_: int) -> Tensor:
            losses = []
            for piece in pieces:
                loss = loss_of(model, piece) / number
                loss.backward()
                losses.append(loss.detach())
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return torch.stack(losses).sum()

        return Contestant(model, update)

    def ours(self, batch: Batch, number: int, **options: Any) -> Contestant:
        """BigStep at the same micro-batch."""
        model, optimizer = self.fresh()
        size = self.size.samples // number
        return big_step(model, optimizer, loss_of, [batch], micro_batch_size=size, options=options)

    def entries(self) -> dict[str, Entry]:
        """Everyone: first those that use few micro-batches."""
        batch = images(self.size, self.device)
        small = Case(
            lambda: networks.seeded(partial(self.network, self.small.classes), self.device),
            images(self.small, self.device),
            loss_and_outputs,
        )

        def error_of_full() -> float:
            return distance(small.full(torch.float32), small.truth).gradient

        def error_of_plain() -> float:
            return distance(small.accumulated(self.small.samples // FEW, torch.float32), small.truth).gradient

        def error_of_ours(activations: Activations) -> float:
            found = small.ours(self.small.samples // FEW, torch.float32, activations)
            return distance(found, small.truth).gradient

        entries: dict[str, Entry] = {}
        for number in (FEW, MANY):
            plain = f"plain (wrong), {self.cut(number)}"
            few = number == FEW  # the small batch is cut into few alone: threads take seconds to make their plans
            entries[plain] = Entry(partial(self.hand_loop, batch, number), plain, error=error_of_plain if few else None)
            if few:
                entries["one full batch"] = Entry(partial(self.hand_loop, batch, 1), plain, error=error_of_full)
            entries[f"bigbatch keep, {self.cut(number)}"] = Entry(
                partial(self.ours, batch, number, activations="keep"),
                plain,
                KEPT,
                partial(error_of_ours, "keep") if few else None,
            )
        if self.graphs:  # many small micro-batches, which the host can hardly launch as fast as they run
            cut = f"{self.cut(MANY)}, graph"
            beside = f"plain (wrong), {self.cut(MANY)}"
            micro = partial(self.ours, batch, MANY, batch_norm="micro", cuda_graph=True)
            entries[f"the same (wrong), {cut}"] = Entry(micro, beside)
            kept = partial(self.ours, batch, MANY, activations="keep", cuda_graph=True)
            entries[f"bigbatch keep, {cut}"] = Entry(kept, beside, KEPT)
            if MANY in self.offloads:
                away = partial(self.ours, batch, MANY, activations="offload", cuda_graph=True)
                entries[f"bigbatch offload, {cut}"] = Entry(away, beside, OFFLOADED)
        for number in self.offloads:  # last: it takes a while to pin the host's memory
            entries[f"bigbatch offload, {self.cut(number)}"] = Entry(
                partial(self.ours, batch, number, activations="offload"),
                f"plain (wrong), {self.cut(number)}",
                OFFLOADED,
                partial(error_of_ours, "offload") if number == FEW else None,
            )
        return entries

    def cut(self, number: int) -> str:
        """Say how many micro-batches, of how many samples."""
        return f"{number} × {self.size.samples // number}"


def small_network(scale: Scale) -> Work:
    """ResNet-18 on images as CIFAR has them."""
    network = partial(networks.resnet18, width=scale.width)
    size = scale.resnet18
    return Work("ResNet-18-like", network, size, scale.small_resnet18, scale.device, offloads=(FEW, MANY))


def large_network(scale: Scale) -> Work:
    """ResNet-50; torchvision's where it is there. Pinning what it offloads takes seconds, so that is done once."""
    library = torchvision_models() if scale.width == WIDTH else None
    size, small = scale.resnet50, scale.small_resnet50
    if library is None:
        network = partial(networks.resnet50, width=scale.width)
        return Work("ResNet-50, own", network, size, small, scale.device, offloads=(FEW,))

    def torchvision(classes: int) -> nn.Module:
        return library.resnet50(num_classes=classes)

    return Work("ResNet-50, torchvision", torchvision, size, small, scale.device, offloads=(FEW,))


def measure(work: Work, *, rounds: int, end: float) -> Iterator[tuple[Grid, list[Raced]]]:
    """Yield the table of one network."""
    size = work.size
    title = f"{work.name}: {size.samples:,} images of {size.pixels} × {size.pixels}, float32"
    yield from raced(work.name, title, work.entries(), work.device, rounds=rounds, end=end)
