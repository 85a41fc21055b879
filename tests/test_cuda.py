"""On a GPU: the same gradients, no waiting for the device, no more memory than a hand-written loop."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, counted, errors

pytestmark = pytest.mark.cuda

Batch = tuple[Tensor, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
CLASSES = 7


def model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a small network on the GPU."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, CLASSES)).to("cuda", dtype)


def batches(sizes: list[int], dtype: torch.dtype = torch.float64, seed: int = 1) -> list[Batch]:
    """Return micro-batches of these sizes, some targets ignored, on the GPU."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size in sizes:
        x = torch.randn(size, 5, generator=generator).to("cuda", dtype)
        y = torch.randint(0, CLASSES, (size,), generator=generator)
        y[torch.rand(size, generator=generator) < 0.3] = -100
        found.append((x, y.to("cuda")))
    return found


def cross_entropy(network: nn.Module, batch: Batch) -> Tensor:
    """A masked cross-entropy: its count is on the device."""
    return F.cross_entropy(network(batch[0]), batch[1])


def two_heads(network: nn.Module, batch: Batch) -> Tensor:
    """Two terms with the same targets: counts in constant ratio, both on the device."""
    out = network(batch[0])
    return F.cross_entropy(out, batch[1]) + 0.3 * F.cross_entropy(-out, batch[1], reduction="mean")


def weighted(network: nn.Module, batch: Batch) -> Tensor:
    """Class weights: the count is their sum."""
    weight = torch.ones(CLASSES, device="cuda", dtype=torch.float64).cumsum(0)
    return F.cross_entropy(network(batch[0]), batch[1], weight=weight, label_smoothing=0.1)


def squares(network: nn.Module, batch: Batch) -> Tensor:
    """A mean over all elements: its count is known on the host."""
    return network(batch[0]).square().mean()


def given(network: nn.Module, batch: Batch) -> Tensor:
    """A hand-written masked mean, told by a device tensor."""
    kept = batch[1] != -100
    sums = F.cross_entropy(network(batch[0]), batch[1], reduction="sum")
    return counted(sums / kept.sum().clamp(min=1), kept.sum())


def train(
    network: nn.Module, data: list[Batch], loss: Loss, make: Callable[..., Any], steps: int, **options: Any
) -> Any:
    """Train with the accumulator and return its updates."""
    accumulator = Accumulator(network, make(network.parameters()), steps=steps, **options)
    found = [accumulator.backward(loss(network, batch)) for batch in accumulator.over(data)]
    return [update for update in found if update is not None]


def train_big(  # noqa: PLR0917 - the same as train, for the same call
    network: nn.Module, data: list[Batch], loss: Loss, make: Callable[..., Any], steps: int, clip: float | None
) -> list[float]:
    """Train on the big batches themselves; returns their losses."""
    optimizer, losses = make(network.parameters()), []
    for start in range(0, len(data), steps):
        window = data[start : start + steps]
        big = (torch.cat([x for x, _ in window]), torch.cat([y for _, y in window]))
        found = loss(network, big)
        found.backward()
        losses.append(found.item())
        if clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def distance(a: nn.Module, b: nn.Module) -> float:
    """Return the relative distance of two networks' weights."""
    mine, true = (torch.cat([p.detach().double().flatten() for p in m.parameters()]) for m in (a, b))
    return float((mine - true).norm() / true.norm())


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3, fused=True),
}


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("loss", [cross_entropy, two_heads, weighted, squares, given])
def test_accumulated_is_the_big_batch_on_the_gpu(loss: Loss, make: Callable[..., Any], clip: float | None) -> None:
    """Weights after three updates equal those of the real big batches, in float64."""
    data = batches([8, 8, 5, 8, 3, 8, 8, 1])
    if loss is cross_entropy:
        data[3][1].fill_(-100)  # a count of 0 at the start of a window does not spoil the weights of the rest
    mine, true = model(), model()
    updates = train(mine, data, loss, make, 3, clip_norm=clip)
    train_big(true, data, loss, make, 3, clip)
    assert len(updates) == 3
    # total_weight, which counts targets, has float64 logits' precision here; the sums are float64 throughout
    assert distance(mine, true) < 1e-12


@contextmanager
def syncs() -> Iterator[list[str]]:
    """Collect every host synchronisation that torch notices."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    told = [w for w in caught if "called a synchronizing" in str(w.message)]
    found += [f"{w.message} in {w.filename}, line {w.lineno}" for w in told]


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("loss", [cross_entropy, weighted, squares, given])
def test_an_update_waits_for_nothing(loss: Loss, make: Callable[..., Any], clip: float | None) -> None:
    """No host synchronisation in forward, backward or step, whatever the loss."""
    network = model(torch.float32)
    if loss is weighted:
        network = model()
    data = batches([8, 8, 5] * 2, next(network.parameters()).dtype)
    accumulator = Accumulator(network, make(network.parameters()), steps=3, clip_norm=clip)
    for batch in accumulator.over(data * 2):  # compiles kernels, makes optimizer state, pins memory
        accumulator.backward(loss(network, batch))
    torch.cuda.synchronize()
    with syncs() as theirs:  # some losses of torch wait by themselves: label smoothing with class weights
        for batch in data:
            loss(network, batch)
    with syncs() as found:
        for batch in accumulator.over(data):
            accumulator.backward(loss(network, batch))
    assert len(found) == len(theirs)


@pytest.mark.parametrize(("name", "most"), [("adamw-fused", 0), ("adamw-foreach", 1), ("sgd-fused", 0), ("sgd", 1)])
def test_skipping_waits_once_or_never(name: str, most: int) -> None:
    """skip_nonfinite costs one synchronisation per update, none with a fused optimizer, and skips."""
    network = model(torch.float32)
    before = copy.deepcopy(network.state_dict())
    accumulator = Accumulator(network, OPTIMIZERS[name](network.parameters()), steps=2, skip_nonfinite=True)
    bad = batches([4, 4], torch.float32)
    bad[1][0].fill_(float("nan"))
    updates = [accumulator.backward(squares(network, batch)) for batch in accumulator.over(bad)]
    assert updates[-1] is not None
    assert updates[-1].skipped
    assert all(torch.equal(before[key], value) for key, value in network.state_dict().items())
    good = batches([4, 4], torch.float32)
    for batch in accumulator.over(good):
        accumulator.backward(squares(network, batch))
    torch.cuda.synchronize()
    with syncs() as found:
        updates = [accumulator.backward(squares(network, batch)) for batch in accumulator.over(good)]
    update = updates[-1]
    assert len(found) <= most
    assert update is not None
    assert not update.skipped
    assert not all(torch.equal(before[key], value) for key, value in network.state_dict().items())


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_window_without_targets_makes_no_update(make: Callable[..., Any]) -> None:
    """All targets ignored, counted on the device: the optimizer is left alone, also its momentum and decay."""
    network = model()
    data = batches([4, 4])
    accumulator = Accumulator(network, make(network.parameters()), steps=2)
    for x, y in accumulator.over(data):
        accumulator.backward(cross_entropy(network, (x, y.clamp(min=0))))
    before = copy.deepcopy(network.state_dict())
    ignored = [(x, torch.full_like(y, -100)) for x, y in data]
    update = [accumulator.backward(cross_entropy(network, batch)) for batch in accumulator.over(ignored)][-1]
    assert update is not None
    assert update.skipped
    assert all(torch.equal(before[key], value) for key, value in network.state_dict().items())


def test_counts_that_lose_their_ratio_on_the_device_are_refused_before_the_step() -> None:
    """Two masked terms with different masks: raises at the window's end, and nothing was stepped."""
    network = model()
    before = copy.deepcopy(network.state_dict())
    accumulator = Accumulator(network, OPTIMIZERS["sgd"](network.parameters()), steps=2)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(network(x), y) + F.cross_entropy(network(x), y.clamp(min=0))

    (x, y), (x2, y2) = batches([8, 5])
    assert accumulator.backward(loss(x, y)) is None
    last = loss(x2, y2)
    with pytest.raises(errors.SeveralCounts, match="counts="):
        accumulator.backward(last)
    accumulator.discard()
    assert all(torch.equal(before[key], value) for key, value in network.state_dict().items())


def test_fp16_autocast_with_a_scaler_learns_and_skips_once() -> None:
    """One inf anywhere skips the whole window and halves the scale once."""
    network = model(torch.float32)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    accumulator = Accumulator(network, OPTIMIZERS["adamw-foreach"](network.parameters()), steps=3, scaler=scaler)

    def run(data: list[Batch]) -> list[Any]:
        found = []
        for batch in accumulator.over(data):
            with torch.autocast("cuda", torch.float16):
                loss = cross_entropy(network, batch)
            found.append(accumulator.backward(loss))
        return [update for update in found if update is not None]

    first = run(batches([8] * 6, torch.float32))
    assert [update.skipped for update in first] == [False, False]
    bad = batches([8] * 3, torch.float32)
    bad[1][0].fill_(float("inf"))
    assert [update.skipped for update in run(bad)] == [True]
    assert scaler.get_scale() == 2.0**9
    last = run(batches([8] * 3, torch.float32))
    assert [update.skipped for update in last] == [False]


@pytest.mark.parametrize("name", ["adamw-fused", "adamw-foreach", "sgd"])
def test_bf16_parameters_add_up_in_float32(name: str) -> None:
    """The gradient before the step is float32 and close to the float64 sum of the micro-gradients."""
    network = model(torch.bfloat16)
    twin = copy.deepcopy(network)
    data = batches([8, 8, 5, 3] * 8, torch.bfloat16)
    seen: list[Tensor] = []
    accumulator = Accumulator(network, OPTIMIZERS[name](network.parameters()), steps=32)
    accumulator.before_step(lambda: seen.extend(p.grad.clone() for p in network.parameters() if p.grad is not None))
    counts, sums = [], [torch.zeros_like(p, dtype=torch.float64) for p in twin.parameters()]
    for x, y in accumulator.over(data):
        accumulator.backward(F.cross_entropy(network(x).float(), y))
        counts.append(float((y != -100).sum()))
        for total, g in zip(
            sums, torch.autograd.grad(F.cross_entropy(twin(x).float(), y), list(twin.parameters())), strict=True
        ):
            total.add_(counts[-1] * g.double())
    for mine, total in zip(seen, sums, strict=True):
        true = total / sum(counts)
        assert mine.dtype == torch.float32
        # each micro-gradient is rounded to bf16 once, weighed or not; a bf16 sum would be 10 times further away
        assert float((mine.double() - true).norm() / true.norm()) < 5e-3


def test_no_more_memory_than_a_hand_loop() -> None:
    """Peak memory is the tuned hand loop's, but for a few scalars."""

    def peak(run: Callable[[nn.Module, torch.optim.Optimizer], None]) -> int:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
        optimizer = torch.optim.AdamW(network.parameters(), fused=True)
        run(network, optimizer)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        run(network, optimizer)
        return torch.cuda.max_memory_allocated()

    x = torch.randn(64, 512, device="cuda")
    y = torch.randint(0, 512, (64,), device="cuda")

    def hand(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(4):
            (F.cross_entropy(network(x), y) / 4).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def ours(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        accumulator = Accumulator(network, optimizer, steps=4, clip_norm=1.0)
        for _ in accumulator.over(range(4)):
            accumulator.backward(F.cross_entropy(network(x), y))

    assert peak(ours) <= peak(hand) + 16384


def test_a_tensor_that_looks_like_a_cast_weight_is_told_late_and_without_waiting() -> None:
    """Detached keys of the shape of a frozen head, after autocast's copies of it were seen: heard of some losses on."""
    network, head = (
        nn.Linear(5, 16).cuda(),
        nn.Linear(16, CLASSES, bias=False).cuda().requires_grad_(requires_grad=False),
    )
    accumulator = Accumulator([network, head], torch.optim.SGD(network.parameters(), lr=0.1), steps=1)
    x = torch.randn(CLASSES, 5, device="cuda")

    def train(weight: Callable[[], Tensor]) -> None:
        for _ in range(40):
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(F.linear(network(x), weight()), torch.arange(CLASSES, device="cuda"))
            accumulator.backward(loss)

    train(lambda: head.weight)
    with pytest.raises(errors.UnreadableLoss, match="copy of a frozen weight, and is none"):
        train(lambda: network(x).detach())
