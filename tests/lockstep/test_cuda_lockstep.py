"""Lock-step on a GPU: BatchNorm and contrastive losses are the big batch's, wherever activations stay."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbatch import BigStep, Options, across
from tests.test_cuda import syncs

pytestmark = pytest.mark.cuda
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Convolutions, norms, activations in place, and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.last = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, h, w) → the same."""
        around = x
        x = self.body(x)
        x += around
        found: Tensor = self.last(x)
        return found


def residual(channels: int = 16, blocks: int = 2, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a small residual network on the device."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels, momentum=None), nn.ReLU())
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5))
    return nn.Sequential(stem, *(Block(channels) for _ in range(blocks)), head).to("cuda", dtype)


def images(number: int, seed: int = 0, side: int = 12, dtype: torch.dtype = torch.float64) -> Batch:
    """Return images on the host, and their labels."""
    by = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (number,), generator=by)
    return torch.randn(number, 3, side, side, generator=by, dtype=dtype), labels


def cross_entropy(network: nn.Module, batch: Batch) -> Tensor:
    """Return the mean over samples."""
    return F.cross_entropy(network(batch[0]), batch[1])


def on_device(batch: Batch) -> Batch:
    """Move a batch."""
    return batch[0].cuda(), batch[1].cuda()


def apart(one: nn.Module, other: nn.Module) -> float:
    """Return how far parameters and buffers lie apart, relatively."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-3)) for a, b in pairs)


@pytest.mark.parametrize("activations", ["auto", "keep", "offload"])
@pytest.mark.parametrize("size", [1, 4, 5])
def test_batch_norm_is_the_big_batches(activations: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and running statistics after several updates, from uneven micro-batches."""
    monkeypatch.setattr("bigbatch.lockstep.offload_store._WORTH_MOVING", 1024)
    mine, true = residual(), residual()
    step = BigStep(
        mine,
        torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9),
        cross_entropy,
        micro_batch_size=size,
        clip_norm=1.0,
        options=Options(activations=activations),  # type: ignore[arg-type]
    )
    optimizer = torch.optim.SGD(true.parameters(), lr=0.1, momentum=0.9)
    for number in range(4):
        batch = images(13, number)
        update = step(batch)
        optimizer.zero_grad()
        loss = cross_entropy(true, on_device(batch))
        loss.backward()
        nn.utils.clip_grad_norm_(true.parameters(), 1.0)
        optimizer.step()
        assert abs(update.loss.item() - loss.item()) < 1e-12
    assert apart(mine, true) < 1e-12


def test_checkpoints_inside_meet_again() -> None:
    """Both kinds of checkpoint run BatchNorm again in backward, where micro-batches meet again."""

    class Checkpointed(nn.Module):
        def __init__(self, *, reentrant: bool) -> None:
            super().__init__()
            self.network, self.reentrant = residual(), reentrant

        def forward(self, x: Tensor) -> Tensor:
            x = self.network[0](x)  # type: ignore[index]
            for block in self.network[1:-1]:  # type: ignore[index]
                x = checkpoint(block, x, use_reentrant=self.reentrant)
            found: Tensor = self.network[-1](x)  # type: ignore[index]
            return found

    for reentrant in (False, True):
        mine, true = Checkpointed(reentrant=reentrant), Checkpointed(reentrant=reentrant)
        step = BigStep(mine, torch.optim.SGD(mine.parameters(), lr=0.1), cross_entropy, micro_batch_size=4)
        optimizer = torch.optim.SGD(true.parameters(), lr=0.1)
        for number in range(2):
            batch = images(13, number)
            step(batch)
            optimizer.zero_grad()
            cross_entropy(true, on_device(batch)).backward()
            optimizer.step()
        assert apart(mine, true) < 1e-12


@pytest.mark.parametrize("activations", ["keep", "offload"])
@pytest.mark.parametrize("last", [False, True])
def test_autocast_and_channels_last(activations: Any, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision inside, channels behind: no further from float64 than the whole batch is."""
    monkeypatch.setattr("bigbatch.lockstep.offload_store._WORTH_MOVING", 1024)
    batch = on_device(images(32, side=16))
    precise = residual(32)
    cross_entropy(precise, batch).backward()
    truth = torch.cat([p.grad.flatten() for p in precise.parameters() if p.grad is not None])
    layout = torch.channels_last if last else torch.contiguous_format
    errors = []
    for size in (32, 9):
        network = residual(32, dtype=torch.float32).to(memory_format=layout)  # type: ignore[call-overload]
        found: list[Tensor] = []
        options = Options(activations=activations, check=False)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
        step = BigStep(network, optimizer, cross_entropy, micro_batch_size=size, options=options)
        parameters = list(network.parameters())
        step.before_step(
            lambda parameters=parameters, found=found: found.append(  # type: ignore[misc]
                torch.cat([p.grad.flatten() for p in parameters]).double()
            )
        )
        with torch.autocast("cuda", dtype=torch.bfloat16):
            step((batch[0].float().to(memory_format=layout), batch[1]))
        errors.append(float((found[0] - truth).norm() / truth.norm()))
    assert errors[1] < 2 * errors[0]


def test_float32_rounds_no_more_than_the_big_batch(record_property: Callable[[str, object], None]) -> None:
    """Against float64, ours beside the full batch's own rounding."""
    precise = residual(32, 3)
    batch = on_device(images(64, side=16))
    cross_entropy(precise, batch).backward()
    truth = torch.cat([p.grad.flatten() for p in precise.parameters() if p.grad is not None])
    low = (batch[0].float(), batch[1])
    full = copy.deepcopy(residual(32, 3, torch.float32))
    cross_entropy(full, low).backward()
    theirs = torch.cat([p.grad.flatten() for p in full.parameters() if p.grad is not None]).double()
    errors = [float((theirs - truth).norm() / truth.norm())]
    for activations in ("keep", "offload"):
        network = residual(32, 3, torch.float32)
        found: list[Tensor] = []
        step = BigStep(
            network,
            torch.optim.SGD(network.parameters(), lr=0.0),
            cross_entropy,
            micro_batch_size=16,
            options=Options(activations=activations),
        )
        step.before_step(
            lambda network=network, found=found: found.append(  # type: ignore[misc]
                torch.cat([p.grad.flatten() for p in network.parameters()]).double()
            )
        )
        step(low)
        errors.append(float((found[0] - truth).norm() / truth.norm()))
    record_property("float32 gradient errors: full batch, keep, offload", errors)
    assert max(errors[1:]) < 4 * errors[0] + 1e-6


@pytest.mark.parametrize("activations", ["auto", "keep", "recompute", "offload"])
def test_a_contrastive_loss_is_the_big_batches(activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row against all, with a learned temperature."""
    monkeypatch.setattr("bigbatch.lockstep.offload_store._WORTH_MOVING", 64)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(0.0), nn.Linear(32, 4))
            self.other, self.scale = nn.Linear(7, 4), nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return F.normalize(self.one(x), dim=1), F.normalize(self.other(y), dim=1), self.scale.exp()

    def clip(network: nn.Module, batch: Batch) -> Tensor:
        one, other, scale = network(*batch)
        mine = across.offset() + torch.arange(len(one), device=one.device)
        rows = F.cross_entropy(scale * one @ across.gather(other).T, mine)
        return (rows + F.cross_entropy(scale * other @ across.gather(one).T, mine)) / 2

    mine, true = Pair().to("cuda", torch.float64), Pair().to("cuda", torch.float64)
    options = Options(activations=activations)  # type: ignore[arg-type]
    step = BigStep(mine, torch.optim.SGD(mine.parameters(), lr=0.1), clip, micro_batch_size=4, options=options)
    optimizer = torch.optim.SGD(true.parameters(), lr=0.1)
    for number in range(3):
        by = torch.Generator().manual_seed(number)
        batch = tuple(torch.randn(11, n, generator=by, dtype=torch.float64) for n in (6, 7))
        update = step(batch)
        optimizer.zero_grad()
        loss = clip(true, (batch[0].cuda(), batch[1].cuda()))
        loss.backward()
        optimizer.step()
        assert abs(update.loss.item() - loss.item()) < 1e-12
    assert apart(mine, true) < 1e-12


class Attending(nn.Module):
    """A layer of attention, and a temperature."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(n, tokens, 32) → (n, 32)."""
        return F.normalize(self.layer(x).mean(1), dim=1), self.scale.exp()


@pytest.mark.parametrize("tokens", [7, 32, 65])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("low", [False, True])
def test_attention_runs_again_as_it_ran(tokens: int, dropout: float, low: bool) -> None:
    """What its kernels save beside, as a seed that nobody has drawn, is not taken for another way."""

    def contrasted(network: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            found, scale = network(x)
        mine = across.offset() + torch.arange(len(x), device=x.device)
        return F.cross_entropy(scale * found.float() @ across.gather(found.float()).T, mine)

    network = Attending(dropout).cuda()
    step = BigStep(network, torch.optim.SGD(network.parameters(), lr=0.1), contrasted, micro_batch_size=4)
    for _ in range(2):
        step(torch.randn(12, tokens, 32))
    assert step._together._recomputed


def without_waiting(network: nn.Module) -> nn.Module:
    """Have no norm that asks the device how many batches there were."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d) and module.momentum is None:
            module.momentum = 0.1
    return network


@pytest.mark.parametrize("activations", ["keep", "offload"])
@pytest.mark.parametrize("last", [False, True])
def test_a_window_is_replayed_whole(activations: Any, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward of all micro-batches are one graph, copies to the host and back included."""
    monkeypatch.setattr("bigbatch.lockstep.offload_store._WORTH_MOVING", 1024)
    mine, true = without_waiting(residual()), without_waiting(residual())
    if last:
        mine, true = (each.to(memory_format=torch.channels_last) for each in (mine, true))  # type: ignore[call-overload]  # torch says not
    options = Options(activations=activations, cuda_graph=True)
    step = BigStep(mine, torch.optim.SGD(mine.parameters(), lr=0.1), cross_entropy, micro_batch_size=4, options=options)
    optimizer = torch.optim.SGD(true.parameters(), lr=0.1)
    for number, size in enumerate([11, 11, 11, 9, 11, 9, 9]):
        batch = images(size, number)
        update = step(batch)
        optimizer.zero_grad()
        loss = cross_entropy(true, on_device(batch))
        loss.backward()
        optimizer.step()
        assert abs(update.loss.item() - loss.item()) < 1e-12
        assert apart(mine, true) < 1e-12
    assert step._runner.whole is not None
    assert (step._runner.whole.graphs.launches, step._runner.whole.graphs.replays) == (2, 3)


@pytest.mark.parametrize("activations", ["auto", "keep"])
def test_a_contrastive_window_is_replayed_whole(activations: Any) -> None:
    """Also where the model runs twice; extras are copies."""

    def contrasted(network: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        found, scale = network(x)
        mine = across.offset() + torch.arange(len(x), device=x.device)
        return F.cross_entropy(scale * found @ across.gather(found).T, mine), found

    mine, true = (Attending(0.0).to("cuda", torch.float64) for _ in range(2))
    options = Options(activations=activations, cuda_graph=True)
    step = BigStep(mine, torch.optim.SGD(mine.parameters(), lr=0.1), contrasted, micro_batch_size=4, options=options)
    optimizer = torch.optim.SGD(true.parameters(), lr=0.1)
    found, expected = [], []
    for number in range(5):
        batch = torch.randn(11, 7, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        update = step(batch)
        optimizer.zero_grad()
        loss, outputs = contrasted(true, batch.cuda())
        loss.backward()
        optimizer.step()
        found.append(update.extras)
        expected.append(outputs.detach())
        assert abs(update.loss.item() - loss.item()) < 1e-12
    assert apart(mine, true) < 1e-12
    assert all(torch.allclose(*each, rtol=0, atol=1e-12) for each in zip(found, expected, strict=True))
    assert step._runner.whole is not None
    assert step._runner.whole.graphs.replays == 3


@pytest.mark.parametrize("what", ["a norm that waits", "dropout", "own generator"])
def test_what_cannot_be_captured_is_launched(what: str) -> None:
    """A warning says why; the update is right."""

    def model() -> nn.Module:
        if what == "a norm that waits":
            return residual()
        return nn.Sequential(without_waiting(residual()), nn.Dropout(0.5) if what == "dropout" else Noise())

    def train(step: BigStep) -> None:
        torch.manual_seed(2)
        for number in range(4):
            step(images(11, number))

    torch.manual_seed(1)
    network, twin = model(), model()
    steps = [
        BigStep(
            each,
            torch.optim.SGD(each.parameters(), lr=0.1),
            cross_entropy,
            micro_batch_size=4,
            options=Options(cuda_graph=graph, activations="keep", check=False),
        )
        for each, graph in ((network, True), (twin, False))
    ]
    with pytest.warns(UserWarning, match="cannot be captured as a CUDA graph"):
        train(steps[0])
    torch.rand(2, device="cuda")  # the generator is not in a capture
    assert steps[0]._runner.whole is None
    train(steps[1])
    assert apart(network, twin) < 1e-12


def test_graphs_of_others_keep_to_their_own_memory() -> None:
    """Whatever else is captured meanwhile, and gives memory back that matrix products work in."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 5)).cuda()
    coupled = without_waiting(residual(dtype=torch.float32))

    def step(network: nn.Module) -> BigStep:
        optimizer, options = torch.optim.SGD(network.parameters(), lr=0.1), Options(cuda_graph=True)
        return BigStep(network, optimizer, cross_entropy, micro_batch_size=4, options=options)

    steps = [step(plain), step(coupled)]
    by = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 64, generator=by), torch.randint(5, (12,), generator=by)
    for _ in range(3):
        steps[0](rows)
    for number in range(3):
        steps[1](images(11, number, dtype=torch.float32))
    torch.cuda.empty_cache()
    filled = [torch.ones(1 << 22, device="cuda") for _ in range(128)]
    for number in range(2):
        steps[0](rows)
        steps[1](images(11, number, dtype=torch.float32))
    assert all(bool((each == 1).all()) for each in filled)
    assert all(each._runner.whole is not None for each in steps)


class Noise(nn.Module):
    """Noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.by = torch.Generator("cuda").manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        """Add some."""
        return x + torch.rand(x.shape, generator=self.by, device=x.device, dtype=x.dtype)


def test_a_replayed_window_under_autocast() -> None:
    """Casts of weights are made in every replay: they follow the weights."""

    def low(network: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(network(batch[0]).float(), batch[1])

    networks = [without_waiting(residual(dtype=torch.float32)) for _ in range(2)]
    for network, graph in zip(networks, (True, False), strict=True):
        step = BigStep(
            network,
            torch.optim.SGD(network.parameters(), lr=0.1),
            low,
            micro_batch_size=4,
            options=Options(cuda_graph=graph, activations="keep"),
        )
        for number in range(6):
            step(images(11, number, dtype=torch.float32))
        assert step._runner.whole is None or step._runner.whole.graphs.replays == 4
    assert apart(*networks) < 1e-2


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_a_window_in_lock_step_waits_for_nothing(activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first windows no operation makes the host wait for the device."""
    monkeypatch.setattr("bigbatch.lockstep.offload_store._WORTH_MOVING", 1024)
    network = without_waiting(residual(dtype=torch.float32))  # torch itself waits to know how many batches there were
    step = BigStep(
        network,
        torch.optim.SGD(network.parameters(), lr=0.1),
        cross_entropy,
        micro_batch_size=4,
        clip_norm=1.0,
        options=Options(activations=activations),  # type: ignore[arg-type]
    )
    batch = on_device(images(12, dtype=torch.float32))
    for _ in range(4):  # the fourth looks whether samples are coupled, and waits for that
        step(batch)
    torch.cuda.synchronize()
    with syncs() as found:
        step(batch)
    assert found == []
    offload = step._together._offload
    assert (offload is not None and offload.held > 0) == (activations == "offload")


def test_offloading_frees_the_device(record_property: Callable[[str, object], None]) -> None:
    """A window of eight micro-batches peaks far below one that keeps all activations."""
    peaks = {}
    for activations in ("keep", "offload"):
        network = residual(64, 6, torch.float32)
        step = BigStep(
            network,
            torch.optim.SGD(network.parameters(), lr=0.1),
            cross_entropy,
            micro_batch_size=64,
            options=Options(activations=activations, check=False),
        )
        batch = images(512, side=32, dtype=torch.float32)
        step(batch)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step(batch)
        peaks[activations] = torch.cuda.max_memory_allocated()
        del step, network
    record_property("peaks", peaks)
    assert peaks["offload"] < 0.5 * peaks["keep"]
