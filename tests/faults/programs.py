"""Tiny training programs for both entrances in all modes, whose every part may fail."""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bigbatch import Accumulator, BigStep, GradientNoise, Options, across
from tests.faults.injecting import Fault
from tests.support import samples

Batch = dict[str, Tensor]
WIDTH = 3


class Net(nn.Module):
    """Three parameters, perhaps a BatchNorm, and places to fail in forward and backward.

    `restless`: with a buffer that counts and numbers of three generators, which a failure must not move.
    """

    calls: Tensor

    def __init__(self, fault: Fault, *, norm: bool = False, outputs: int = 1, restless: bool = False) -> None:
        super().__init__()
        self.fault, self.restless = fault, restless
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.scale = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))
            self.linear = nn.Linear(WIDTH, outputs, bias=not norm).double()  # or the norm would cancel it
        self.norm = nn.BatchNorm1d(outputs).double() if norm else nn.Identity()
        self.linear.weight.register_hook(lambda _: fault.visit("parameter hook"))
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64) if restless else None)

    def forward(self, x: Tensor) -> Tensor:
        """(n, …, 3) → (n, …, outputs)."""
        self.fault.visit("forward")
        if self.restless:  # in a way that does not depend on how the batch is cut
            noise = torch.rand(len(x), 1, dtype=torch.float64)
            for row in noise:
                row += random.random() + np.random.rand()  # noqa: NPY002, PLW2901, S311 - those that are restored
            x = x + 0.1 * noise
            self.calls += len(x)
        out: Tensor = self.norm(self.linear(x.to(self.scale.dtype) * self.scale)).tanh()
        if out.requires_grad:
            out.register_hook(lambda _: self.fault.visit("backward"))
        return out


class Draws:
    """An iterator: what it has given out, it does not give out again."""

    def __init__(self, batches: Sequence[Batch], fault: Fault) -> None:
        self.batches, self._fault, self._given = batches, fault, 0

    def __iter__(self) -> Iterator[Batch]:
        """Go on."""
        return self

    def __next__(self) -> Batch:
        """Pass by, then give out the next one."""
        if self._given == len(self.batches):
            raise StopIteration
        self._fault.visit("loader")
        self._given += 1
        return self.batches[self._given - 1]


class Stream(Draws):
    """A loader without a length whose place can be saved and loaded, as torchdata's."""

    _start = 0

    def __iter__(self) -> Iterator[Batch]:
        """Go on where a state says, else from the start."""
        self._given, self._start = self._start, 0
        return self

    def state_dict(self) -> dict[str, int]:
        """Return how many batches it has given out."""
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Have the next iteration begin there."""
        self._start = state["given"]


class Sized(Draws):
    """A loader with a length, which begins anew."""

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        """Begin."""
        self._given = 0
        return self


class SizedStream(Sized, Stream):
    """The same, and its place can be saved."""

    __iter__ = Stream.__iter__


@dataclass
class Program:
    """Everything that a user has made before the first batch, and how a loss is computed."""

    fault: Fault
    models: list[Any]
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Any]
    scaler: torch.amp.GradScaler | None
    batches: list[Any]
    loss: Callable[[Any, Any], Any]  # of the model, or of all models, and a batch
    entrance: Any = None  # the Accumulator or the BigStep
    loop: str = "plain"  # or "sized", "DataLoader", "stream", "iterator", "saved"
    count: Callable[[Batch], Any] | None = None

    @property
    def model(self) -> Any:
        """The one, or all of them."""
        return self.models if len(self.models) > 1 else self.models[0]

    def source(self, position: int) -> Any:
        """Return what a loop takes its batches from, which are those from this position on."""
        left: Any = self.batches[position:]
        if self.loop == "DataLoader":
            own = torch.Generator().manual_seed(0)  # it draws nothing from the default one
            collate = self.fault.around(lambda batch: batch, "loader")
            return DataLoader(left, batch_size=None, collate_fn=collate, generator=own)
        return Sized(left, self.fault) if self.loop == "sized" else left

    @property
    def parts(self) -> list[Any]:
        """All whose state a user saves."""
        return [*self.models, *self.optimizers, *self.schedulers, *([] if self.scaler is None else [self.scaler])]

    def checkpoint(self) -> dict[str, Any]:
        """Return all that a user saves."""
        numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
        return {"parts": [copy.deepcopy(part.state_dict()) for part in self.parts], "random": numbers}

    def restore(self, saved: dict[str, Any]) -> None:
        """Load it."""
        for part, state in zip(self.parts, copy.deepcopy(saved["parts"]), strict=True):
            part.load_state_dict(state)
        torch.set_rng_state(saved["random"][0])
        random.setstate(saved["random"][1])
        np.random.set_state(saved["random"][2])  # noqa: NPY002


def rows(sizes: Sequence[int], seed: int = 0) -> list[Batch]:
    """Batches of these sizes, with targets of several kinds; some samples have no label."""
    drawn = [samples.rows(n, 100 * seed + index) for index, n in enumerate(sizes)]
    return [{"x": b["x"], "y": b["scalar"][:, None], "label": b["partly"].clamp(max=1)} for b in drawn]


def sequences(sizes: Sequence[int]) -> list[Batch]:
    """Padded sequences with a mask."""
    drawn = [samples.sequences(n, 900 + index) for index, n in enumerate(sizes)]
    return [{"x": b["x"] * b["mask"][..., None], "mask": b["mask"]} for b in drawn]


def _mean(model: Any, batch: Batch, times: int = 1) -> Tensor:
    return F.mse_loss(model(batch["x"].repeat(times, 1)).double(), batch["y"].repeat(times, 1))


def _cross_entropy(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["label"])


def _divided(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["label"], reduction="sum") / _labels(batch).double()


def _labels(batch: Batch) -> Tensor:
    return (batch["label"] >= 0).sum()


def _two_terms(model: Any, batch: Batch) -> Tensor:
    out = model(batch["x"])
    return F.cross_entropy(out, batch["label"]) + 0.3 * out.pow(2).mean()


def _contrastive(model: Any, batch: Batch) -> Tensor:
    images, texts = model(batch["x"]), batch["y"] * model.linear.bias
    return F.cross_entropy(images @ across.gather(texts).T, across.offset() + torch.arange(len(images)))


def _with_extras(model: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(batch["x"])
    return F.mse_loss(out, batch["y"]), {"out": out.detach()}


def program(entrance: str, mode: str, fault: Fault) -> Program:
    """Make the program of a mode, every part of which passes by the fault."""
    return made(entrance, fault, **MODES[entrance][mode])


# fmt: off
def made(
    entrance: str, fault: Fault, *, net: Callable[[Fault], nn.Module] = Net, loss: Callable[[Any, Any], Any] = _mean,
    batches: Sequence[Any] = (), nets: int = 1, adam: bool = False, schedule: bool = False, scaled: bool = False,
    hook: bool = False, observed: bool = False, dtype: torch.dtype = torch.float64, loop: str = "plain",
    count: Callable[[Batch], Any] | None = None, **settings: Any,
) -> Program:
    # fmt: on
    """Make a program; `settings` are those of the entrance, or options."""
    models = [net(fault).to(dtype) for _ in range(nets)]
    optimizers: list[torch.optim.Optimizer] = []
    for index, model in enumerate(models):
        of: Any = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        if adam or index:
            of = partial(torch.optim.AdamW, lr=0.05)
        optimizers.append(of(model.parameters(), foreach=False))
        optimizers[-1].register_step_pre_hook(lambda *_: fault.visit("optimizer before"))
        optimizers[-1].register_step_post_hook(lambda *_: fault.visit("optimizer after"))
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizers[0], gamma=0.8)] if schedule else []
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) if scaled else None
    if scaler is not None:
        scaler.scale(torch.zeros(()))  # makes its tensors: torch does not survive a failure there
    called = [(scaler, name) for name in ("unscale_", "step", "update") if scaled] + [
        (each, "step") for each in schedulers
    ]
    for part, method in called:
        name = f"{type(part).__name__}.{method}"
        setattr(part, method, fault.around(getattr(part, method), f"{name} before", f"{name} after"))
    for name in ("counts", "collate", "lengths"):  # what users pass as functions
        if callable(settings.get(name)):
            settings[name] = fault.around(settings[name], name)
    given = list(batches or rows((2, 1, 3, 2, 1) if entrance == "Accumulator" else (4, 5, 4)))
    passing = fault.around(loss, "loss before", "loss")
    found = Program(fault, models, optimizers, schedulers, scaler, given, passing, loop=loop, count=count)
    settings |= {"scheduler": schedulers or None, "scaler": scaler}
    optimizer = optimizers if nets > 1 else optimizers[0]
    if entrance == "Accumulator":
        found.entrance = Accumulator(found.model, optimizer, **{"steps": 2, **settings})
    else:
        named = [each.name for each in fields(Options) if each.name in settings]
        settings = {"micro_batch_size": 2, "options": Options(**{n: settings.pop(n) for n in named}), **settings}
        found.entrance = BigStep(found.model, optimizer, found.loss, **settings)
    if observed:
        GradientNoise(found.entrance, every=1)
    if hook:
        found.entrance.before_step(lambda: fault.visit("before_step hook"))
    return found


_WIDE, _NORMED = partial(Net, outputs=2), partial(Net, norm=True)
_NORM: dict[str, Any] = {
    "net": partial(Net, norm=True, outputs=2),
    "loss": lambda m, b: (m(b["x"]) - b["y"]).pow(2).mean(),
}
_SKIP: dict[str, Any] = {"net": _WIDE, "loss": _cross_entropy, "schedule": True, "skip_nonfinite": True}
_SCALED: dict[str, Any] = {"scaled": True, "schedule": True}
_TWO: dict[str, Any] = {
    "nets": 2,
    "loss": lambda m, b: F.mse_loss(m[0](b["x"]) + m[1](b["x"]), b["y"]),
    "clip_norm": 0.5,
    "hook": True,
}
_PACKED: dict[str, Any] = {
    "loss": lambda m, b: m(b["x"])[b["mask"]].pow(2).mean(),
    "batches": sequences((4, 5, 4)),
    "micro_batch_size": "auto",
}
_SAMPLES = [list(zip(b["x"], b["y"], strict=True)) for b in rows((4, 5, 4))]
MODES: dict[str, dict[str, dict[str, Any]]] = {
    "Accumulator": {
        "mean": {},
        "sum, sized over": {"loop": "sized", "loss": lambda m, b: (m(b["x"]) - b["y"]).pow(2).sum()},
        "count=": {"net": _WIDE, "loss": _divided, "count": _labels},
        "counts=, over": {
            "loop": "sized",
            "net": _WIDE,
            "loss": _two_terms,
            "counts": lambda b: (_labels(b), 2 * len(b["x"])),
        },
        "clip, schedule, hook": {"loop": "sized", "clip_norm": 0.5, "schedule": True, "hook": True},
        "scaler": {**_SCALED, "loop": "sized", "adam": True, "clip_norm": 1.0},
        "scaler, momentum": {"scaled": True, "hook": True},
        "bf16": {"dtype": torch.bfloat16, "clip_norm": 1.0},
        "two optimizers": {**_TWO, "loop": "sized"},
        "unsized over": {"loop": "stream", "schedule": True},
        "DataLoader over": {"loop": "DataLoader", "clip_norm": 1.0},
        "iterator over": {"loop": "iterator"},
        "batch_norm micro": {"loop": "sized", "net": _NORMED, "loss": partial(_mean, times=2), "batch_norm": "micro"},
        "skip_nonfinite": _SKIP,
        "saved": {"loop": "saved", "adam": True},
        "observed": {"loop": "sized", "observed": True, "clip_norm": 1.0},
    },
    "BigStep": {
        "plain": {},
        "check off": {"check": False, "adam": True},
        "auto": {"micro_batch_size": "auto", "adam": True},
        "restless": {"net": partial(Net, restless=True)},
        "several counts": {"net": _WIDE, "loss": _two_terms, "hook": True},
        "packed": {**_PACKED, "lengths": lambda b: b["mask"].sum(1), "token_budget": 12},
        "packed, auto": {**_PACKED, "lengths": "mask", "adam": True},
        "collated list": {
            "batches": _SAMPLES,
            "collate": lambda some: {"x": torch.stack([x for x, _ in some]), "y": torch.stack([y for _, y in some])},
        },
        "across, keep": {"loss": _contrastive, "activations": "keep"},
        "across, offload": {"loss": _contrastive, "activations": "offload", "schedule": True},
        "across, recompute": {"loss": _contrastive, "activations": "recompute", "schedule": True, "hook": True},
        "across, auto": {"loss": _contrastive, "adam": True, "clip_norm": 1.0},
        "across.mean": {"loss": lambda m, b: across.once(across.mean(_mean(m, b)).sqrt()), "micro_batch_size": 3},
        "BatchNorm": _NORM,
        "BatchNorm, offload": {**_NORM, "activations": "offload", "schedule": True},
        "BatchNorm, keep": {**_NORM, "activations": "keep"},
        "bf16": {"dtype": torch.bfloat16, "micro_batch_size": 5, "clip_norm": 1.0},
        "batch_norm micro": {**_NORM, "micro_batch_size": 5, "batch_norm": "micro", "check": False},
        "saved": {"loop": "saved", "adam": True},
        "extras": {"loss": _with_extras, "clip_norm": 0.5},
        "skip_nonfinite": _SKIP,
        "scaler, schedule, hook": {**_SCALED, "hook": True, "clip_norm": 0.5},
        "two optimizers": _TWO,
    },
}
SPLIT_MATTERS = frozenset({("BigStep", "bf16"), ("BigStep", "batch_norm micro")})
