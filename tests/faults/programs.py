"""Tiny training programs for both entrances in all modes, whose every part may fail."""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bigbatch import Accumulator, BigStep, GradientNoise, Options, across
from tests.faults.injecting import Fault

Batch = dict[str, Tensor]
WIDTH = 2


# Parts that pass by the fault.


class Fuse(torch.autograd.Function):
    """An identity whose backward passes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        """Remember the fault."""
        ctx.fault = fault
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Pass by it."""
        ctx.fault.visit("backward")
        return gradients[0], None


class Net(nn.Module):
    """Three parameters, perhaps a BatchNorm, and places to fail in forward and backward."""

    def __init__(self, fault: Fault, *, norm: bool = False, outputs: int = 1, seed: int = 3) -> None:
        super().__init__()
        self.fault = fault
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.scale = nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))
            self.linear = nn.Linear(WIDTH, outputs, bias=not norm).double()  # or the norm would cancel it
        self.norm = nn.BatchNorm1d(outputs).double() if norm else None
        self.linear.weight.register_hook(self._hook)

    def _hook(self, _gradient: Tensor) -> None:
        self.fault.visit("parameter hook")

    def forward(self, x: Tensor) -> Tensor:
        """(n, …, 2) → (n, …, outputs)."""
        self.fault.visit("forward")
        hidden = Fuse.apply(x.to(self.scale.dtype) * self.scale, self.fault)  # type: ignore[no-untyped-call]
        out: Tensor = self.linear(hidden)
        if self.norm is not None:
            out = self.norm(out)
        out = torch.tanh(out)
        if out.requires_grad:
            out.register_hook(lambda _: self.fault.visit("tensor hook"))
        return out


class Restless(Net):
    """The same with buffers of every kind and numbers of three generators, which a failure must not move."""

    calls: Tensor
    table: Tensor

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.register_buffer("table", torch.full((WIDTH,), 0.7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """The same, with noise that does not depend on how the batch is cut."""
        noise = torch.rand(len(x), 1, dtype=torch.float64)
        for i in range(len(x)):
            noise[i] += random.random() + np.random.rand()  # noqa: NPY002, S311 - those that are restored
        out = super().forward((x + 0.1 * noise) * self.table)
        self.calls += len(x)
        return out


class Momentum(torch.optim.Optimizer):
    """SGD with momentum that passes by the fault between two parameters."""

    def __init__(self, parameters: Sequence[nn.Parameter], fault: Fault, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.fault = fault

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step one parameter after the other."""
        del closure
        self.fault.visit("optimizer before")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                moving = self.state[p].setdefault("moving", torch.zeros_like(p))
                moving.mul_(0.9).add_(p.grad)
                p.sub_(moving, alpha=group["lr"])
                self.fault.visit("optimizer half way")
        self.fault.visit("optimizer after")


class Schedule(torch.optim.lr_scheduler.ExponentialLR):
    """A scheduler that passes by before and after its step."""

    def __init__(self, optimizer: torch.optim.Optimizer, fault: Fault) -> None:
        self.fault = fault
        super().__init__(optimizer, gamma=0.8)

    def step(self, epoch: Any = None) -> None:
        """Pass by, step, pass by."""
        self.fault.visit("scheduler before")
        super().step(epoch)
        self.fault.visit("scheduler after")

    def state_dict(self) -> dict[str, Any]:
        """Leave the fault out."""
        return {key: value for key, value in super().state_dict().items() if key != "fault"}


class Scaler(torch.amp.GradScaler):
    """A scaler that passes by in each of its calls."""

    def __init__(self, fault: Fault) -> None:
        super().__init__("cpu", init_scale=4.0, growth_interval=2)
        self.scale(
            torch.zeros(())
        )  # its tensors are made at the first call, and torch does not survive a failure there
        self.fault = fault

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale, pass by."""
        super().unscale_(optimizer)
        self.fault.visit("scaler unscale")

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Pass by, step, pass by."""
        self.fault.visit("scaler step")
        found = super().step(optimizer, *args, **kwargs)
        self.fault.visit("scaler stepped")
        return found

    def update(self, new_scale: Any = None) -> None:
        """Pass by, update, pass by."""
        self.fault.visit("scaler update")
        super().update(new_scale)
        self.fault.visit("scaler updated")


class Stream:
    """A loader without a length whose place can be saved and loaded, as torchdata's."""

    def __init__(self, batches: Sequence[Batch], fault: Fault) -> None:
        self._batches, self._fault = batches, fault
        self._given = self._start = 0

    def __iter__(self) -> Iterator[Batch]:
        """Go on where a state says, else from the start."""
        self._given, self._start = self._start, 0
        while self._given < len(self._batches):
            self._fault.visit("loader")
            self._given += 1
            yield self._batches[self._given - 1]

    def state_dict(self) -> dict[str, int]:
        """Return how many batches it has given out."""
        return {"given": self._given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Have the next iteration begin there."""
        self._start = state["given"]


class Samples(Dataset[Batch]):
    """The dataset of a DataLoader: one batch at an index."""

    def __init__(self, batches: Sequence[Batch], fault: Fault) -> None:
        self._batches, self._fault = batches, fault

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._batches)

    def __getitem__(self, index: int) -> Batch:
        """Pass by, then return it."""
        self._fault.visit("loader")
        return self._batches[index]


def loader_of(batches: Sequence[Batch], fault: Fault) -> DataLoader[Batch]:
    """Return torch's own loader; it draws nothing from the default generator."""
    own = torch.Generator().manual_seed(0)
    return DataLoader(Samples(batches, fault), batch_size=None, collate_fn=lambda batch: batch, generator=own)


class Draws:
    """An iterator: what it has given out, it does not give out again."""

    def __init__(self, batches: Sequence[Batch], fault: Fault) -> None:
        self._batches, self._fault, self._given = batches, fault, 0

    def __iter__(self) -> "Draws":
        """Go on."""
        return self

    def __next__(self) -> Batch:
        """Pass by, then give out the next one."""
        if self._given == len(self._batches):
            raise StopIteration
        self._fault.visit("loader")
        self._given += 1
        return self._batches[self._given - 1]


class Sized(list[Batch]):
    """Batches in memory, with a length."""

    def __init__(self, batches: Sequence[Batch], fault: Fault) -> None:
        super().__init__(batches)
        self._fault = fault

    def __iter__(self) -> Iterator[Batch]:
        """Pass by before each."""
        for batch in super().__iter__():
            self._fault.visit("loader")
            yield batch


# Programs.


@dataclass
class Program:
    """Everything that a user has made before the first batch, and how a loss is computed."""

    fault: Fault
    models: list[Any]
    optimizers: list[torch.optim.Optimizer]
    batches: list[Any]
    loss: Callable[[Batch], Tensor] = lambda _: torch.zeros(())
    schedulers: list[Schedule] = field(default_factory=list)
    scaler: Scaler | None = None
    accumulator: Accumulator | None = None
    step: BigStep | None = None
    loop: str = "plain"  # or "sized", "DataLoader", "stream", "iterator", "saved"
    count: Callable[[Batch], Any] | None = None
    counted_ahead: bool = False

    def checkpoint(self) -> dict[str, Any]:
        """Return all that a user saves."""
        parts = {"models": self.models, "optimizers": self.optimizers, "schedulers": self.schedulers}
        saved: dict[str, Any] = {name: [copy.deepcopy(p.state_dict()) for p in each] for name, each in parts.items()}
        saved["scaler"] = None if self.scaler is None else copy.deepcopy(self.scaler.state_dict())
        saved["random"] = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
        return saved

    def restore(self, saved: dict[str, Any]) -> None:
        """Load it."""
        saved = copy.deepcopy(saved)
        for each, states in ((self.models, "models"), (self.optimizers, "optimizers"), (self.schedulers, "schedulers")):
            for part, state in zip(each, saved[states], strict=True):
                part.load_state_dict(state)
        if self.scaler is not None:
            self.scaler.load_state_dict(saved["scaler"])
        torch.set_rng_state(saved["random"][0])
        random.setstate(saved["random"][1])
        np.random.set_state(saved["random"][2])  # noqa: NPY002


def rows(sizes: Sequence[int], *, start: int = 0) -> list[Batch]:
    """Batches of these sizes, with targets of several kinds."""
    made = []
    for index, n in enumerate(sizes):
        by = torch.Generator().manual_seed(100 * start + index)
        mask = torch.rand(n, generator=by) < 0.7
        mask[0] = True
        made.append(
            {
                "x": torch.randn(n, WIDTH, generator=by, dtype=torch.float64),
                "y": torch.randn(n, 1, generator=by, dtype=torch.float64),
                "label": torch.randint(2, (n,), generator=by).masked_fill(~mask, -100),
            }
        )
    return made


def sequences(sizes: Sequence[int]) -> list[Batch]:
    """Padded sequences with a mask."""
    made = []
    for index, n in enumerate(sizes):
        by = torch.Generator().manual_seed(900 + index)
        lengths = torch.randint(1, 5, (n,), generator=by)
        lengths[0] = 4
        mask = torch.arange(4) < lengths[:, None]
        x = torch.randn(n, 4, WIDTH, generator=by, dtype=torch.float64) * mask[..., None]
        made.append({"x": x, "mask": mask})
    return made


MICRO_BATCHES = (2, 1, 3, 2, 1)


def _accumulating(
    fault: Fault,
    *,
    loop: str = "plain",
    net: Callable[[Fault], Net] = Net,
    loss: Callable[[Any, Batch], Tensor] = lambda m, b: F.mse_loss(m(b["x"]), b["y"]),
    adam: bool = False,
    schedule: bool = False,
    scaled: bool = False,
    hook: bool = False,
    dtype: torch.dtype = torch.float64,
    counts: Callable[[Batch], Any] | None = None,
    count: Callable[[Batch], Any] | None = None,
    nets: int = 1,
    observed: bool = False,
    **settings: Any,
) -> Program:
    models = [net(fault).to(dtype) for _ in range(nets)]
    optimizers: list[torch.optim.Optimizer] = []
    for index, model in enumerate(models):
        own = list(model.parameters())
        with_adam = adam or index
        optimizers.append(torch.optim.AdamW(own, lr=0.05, foreach=False) if with_adam else Momentum(own, fault))
    schedulers = [Schedule(optimizers[0], fault)] if schedule else []
    scaler = Scaler(fault) if scaled else None

    def counting(batch: Batch) -> Any:
        assert counts is not None
        fault.visit("counts")
        return counts(batch)

    accumulator = Accumulator(
        models if nets > 1 else models[0],
        optimizers if nets > 1 else optimizers[0],
        steps=2,
        scheduler=schedulers or None,
        scaler=scaler,
        counts=None if counts is None else counting,
        **settings,
    )
    if observed:
        GradientNoise(accumulator, every=1)
    if hook:
        accumulator.before_step(lambda: fault.visit("before_step hook"))

    def computed(batch: Batch) -> Tensor:
        value = loss(models if nets > 1 else models[0], batch)
        fault.visit("loss")
        return value

    return Program(
        fault,
        models,
        optimizers,
        rows(MICRO_BATCHES),
        computed,
        schedulers,
        scaler,
        accumulator,
        loop=loop,
        count=count,
        counted_ahead=counts is not None,
    )


def _cross_entropy(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["label"])


def _two_terms(model: Any, batch: Batch) -> Tensor:
    out = model(batch["x"])
    return F.cross_entropy(out, batch["label"]) + 0.3 * out.pow(2).mean()


def _two_nets(models: Any, batch: Batch) -> Tensor:
    return F.mse_loss(models[0](batch["x"]) + models[1](batch["x"]), batch["y"])


def _wide(fault: Fault) -> Net:
    return Net(fault, outputs=2)


ACCUMULATORS: dict[str, Callable[[Fault], Program]] = {
    "mean": _accumulating,
    "sum, sized over": lambda f: _accumulating(f, loop="sized", loss=lambda m, b: (m(b["x"]) - b["y"]).pow(2).sum()),
    "count=": lambda f: _accumulating(
        f,
        net=_wide,
        loss=lambda m, b: F.cross_entropy(m(b["x"]), b["label"], reduction="sum") / (b["label"] >= 0).sum().double(),
        count=lambda b: (b["label"] >= 0).sum(),
    ),
    "counts=, over": lambda f: _accumulating(
        f, loop="sized", net=_wide, loss=_two_terms, counts=lambda b: ((b["label"] >= 0).sum(), 2 * len(b["x"]))
    ),
    "clip, schedule, hook": lambda f: _accumulating(f, loop="sized", clip_norm=0.5, schedule=True, hook=True),
    "scaler": lambda f: _accumulating(f, loop="sized", adam=True, scaled=True, schedule=True, clip_norm=1.0),
    "scaler, momentum": lambda f: _accumulating(f, scaled=True, hook=True),
    "bf16": lambda f: _accumulating(
        f, dtype=torch.bfloat16, loss=lambda m, b: F.mse_loss(m(b["x"]).double(), b["y"]), clip_norm=1.0
    ),
    "two optimizers": lambda f: _accumulating(f, loop="sized", nets=2, loss=_two_nets, clip_norm=0.5, hook=True),
    "unsized over": lambda f: _accumulating(f, loop="stream", schedule=True),
    "DataLoader over": lambda f: _accumulating(f, loop="DataLoader", clip_norm=1.0),
    "iterator over": lambda f: _accumulating(f, loop="iterator"),
    "batch_norm micro": lambda f: _accumulating(
        f,
        loop="sized",
        net=lambda fault: Net(fault, norm=True),
        batch_norm="micro",
        loss=lambda m, b: F.mse_loss(m(b["x"].repeat(2, 1)), b["y"].repeat(2, 1)),
    ),
    "skip_nonfinite": lambda f: _accumulating(f, net=_wide, loss=_cross_entropy, skip_nonfinite=True, schedule=True),
    "saved": lambda f: _accumulating(f, loop="saved", adam=True),
    "observed": lambda f: _accumulating(f, loop="sized", observed=True, clip_norm=1.0),
}


def _stepping(
    fault: Fault,
    *,
    net: Callable[[Fault], Net] = Net,
    loss: Callable[[Any, Any], Any] = lambda m, b: F.mse_loss(m(b["x"]), b["y"]),
    batches: list[Any] | None = None,
    size: Any = 2,
    adam: bool = False,
    schedule: bool = False,
    scaled: bool = False,
    hook: bool = False,
    clip_norm: float | None = None,
    nets: int = 1,
    dtype: torch.dtype = torch.float64,
    loop: str = "plain",
    **options: Any,
) -> Program:
    models = [net(fault).to(dtype) for _ in range(nets)]
    optimizers: list[torch.optim.Optimizer] = []
    for index, model in enumerate(models):
        own = list(model.parameters())
        optimizers.append(torch.optim.AdamW(own, lr=0.05, foreach=False) if adam or index else Momentum(own, fault))
    schedulers = [Schedule(optimizers[0], fault)] if schedule else []
    scaler = Scaler(fault) if scaled else None

    def loss_fn(model: Any, batch: Any) -> Any:
        found = loss(model, batch)
        fault.visit("loss")
        return found

    step = BigStep(
        models if nets > 1 else models[0],
        optimizers if nets > 1 else optimizers[0],
        loss_fn,
        micro_batch_size=size,
        clip_norm=clip_norm,
        scheduler=schedulers or None,
        scaler=scaler,
        options=Options(**options),
    )
    if hook:
        step.before_step(lambda: fault.visit("before_step hook"))
    return Program(
        fault,
        models,
        optimizers,
        batches or rows((4, 5, 4)),
        schedulers=schedulers,
        scaler=scaler,
        step=step,
        loop=loop,
    )


def _contrastive(model: Any, batch: Batch) -> Tensor:
    out = model(batch["x"])
    images, texts = out, batch["y"] * model.linear.bias
    every = across.gather(texts)
    logits = images @ every.T
    return F.cross_entropy(logits, across.offset() + torch.arange(len(images)))


def _rooted(model: Any, batch: Batch) -> Tensor:
    return across.once(across.mean(F.mse_loss(model(batch["x"]), batch["y"])).sqrt())


def _masked(model: Any, batch: Batch) -> Tensor:
    return model(batch["x"])[batch["mask"]].pow(2).mean()


def _with_extras(model: Any, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    out = model(batch["x"])
    return F.mse_loss(out, batch["y"]), {"out": out.detach()}


def _collating(fault: Fault) -> Callable[[list[Any]], Batch]:
    def collate(samples: list[Any]) -> Batch:
        fault.visit("collate")
        return {"x": torch.stack([s[0] for s in samples]), "y": torch.stack([s[1] for s in samples])}

    return collate


def _samples() -> list[Any]:
    return [list(zip(b["x"], b["y"], strict=True)) for b in rows((4, 5, 4))]


def _lengths(fault: Fault) -> Callable[[Any], Any]:
    def lengths(batch: Batch) -> Tensor:
        fault.visit("lengths")
        return batch["mask"].sum(1)

    return lengths


def _normed(fault: Fault) -> Net:
    return Net(fault, norm=True, outputs=2)


def _wide_loss(model: Any, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]).double(), batch["y"])


def _norm_loss(model: Any, batch: Batch) -> Tensor:
    return (model(batch["x"]) - batch["y"]).pow(2).mean()


BIG_STEPS: dict[str, Callable[[Fault], Program]] = {
    "plain": _stepping,
    "check off": lambda f: _stepping(f, check=False, adam=True),
    "auto": lambda f: _stepping(f, size="auto", adam=True),
    "restless": lambda f: _stepping(f, net=Restless),
    "several counts": lambda f: _stepping(f, net=_wide, loss=_two_terms, hook=True),
    "packed": lambda f: _stepping(
        f, loss=_masked, batches=sequences((4, 5, 4)), size="auto", lengths=_lengths(f), token_budget=8
    ),
    "packed, auto": lambda f: _stepping(
        f, loss=_masked, batches=sequences((4, 5, 4)), size="auto", lengths="mask", adam=True
    ),
    "collated list": lambda f: _stepping(f, batches=_samples(), collate=_collating(f)),
    "across, keep": lambda f: _stepping(f, loss=_contrastive, activations="keep"),
    "across, offload": lambda f: _stepping(f, loss=_contrastive, activations="offload", schedule=True),
    "across, recompute": lambda f: _stepping(f, loss=_contrastive, activations="recompute", schedule=True, hook=True),
    "across, auto": lambda f: _stepping(f, loss=_contrastive, adam=True, clip_norm=1.0),
    "across.mean": lambda f: _stepping(f, loss=_rooted, size=3),
    "BatchNorm": lambda f: _stepping(f, net=_normed, loss=_norm_loss),
    "BatchNorm, offload": lambda f: _stepping(f, net=_normed, loss=_norm_loss, activations="offload", schedule=True),
    "BatchNorm, keep": lambda f: _stepping(f, net=_normed, loss=_norm_loss, activations="keep"),
    "bf16": lambda f: _stepping(f, loss=_wide_loss, dtype=torch.bfloat16, size=5, clip_norm=1.0),
    "batch_norm micro": lambda f: _stepping(f, net=_normed, loss=_norm_loss, size=5, batch_norm="micro", check=False),
    "saved": lambda f: _stepping(f, loop="saved", adam=True),
    "extras": lambda f: _stepping(f, loss=_with_extras, clip_norm=0.5),
    "skip_nonfinite": lambda f: _stepping(f, net=_wide, loss=_cross_entropy, skip_nonfinite=True, schedule=True),
    "scaler, schedule, hook": lambda f: _stepping(f, scaled=True, schedule=True, hook=True, clip_norm=0.5),
    "two optimizers": lambda f: _stepping(f, nets=2, loss=_two_nets, clip_norm=0.5, hook=True),
}
MODES: dict[str, dict[str, Callable[[Fault], Program]]] = {"Accumulator": ACCUMULATORS, "BigStep": BIG_STEPS}
SPLIT_MATTERS = frozenset({("BigStep", "bf16"), ("BigStep", "batch_norm micro")})
