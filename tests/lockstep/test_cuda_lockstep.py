"""Lock-step on a GPU: BatchNorm and contrastive losses are the big batch's, wherever activations stay."""

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbatch import BigStep, Options, across
from bigbatch.batch.tree import mapped
from tests.support.coupled import Model, clip, gradients_of, held_on_host, mine, twins, unit
from tests.support.samples import rows
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


def residual(
    channels: int = 16, blocks: int = 2, dtype: torch.dtype = torch.float64, momentum: float | None = None
) -> nn.Module:
    """Return a small residual network on the device; without a momentum it waits for that to count batches."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels, momentum=momentum), nn.ReLU())
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


def on_device(batch: Any) -> Any:
    """Move a batch."""
    return mapped(batch, lambda _, leaf: leaf.cuda())


def apart(one: nn.Module, other: nn.Module) -> float:
    """Return how far parameters and buffers lie apart, relatively."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-3)) for a, b in pairs)


def step_of(
    network: nn.Module, loss_fn: Any = cross_entropy, size: int = 4, lr: float = 0.1, **options: Any
) -> BigStep:
    """Return a step by SGD."""
    optimizer = torch.optim.SGD(network.parameters(), lr=lr, momentum=0.9)
    return BigStep(network, optimizer, loss_fn, micro_batch_size=size, options=Options(**options))


def assert_big_batches(
    make: Callable[[], nn.Module], loss_fn: Any, batches: list[Any], size: int = 4, **options: Any
) -> BigStep:
    """Weights, running statistics, losses and extras are those of whole batches on the device."""
    mine, true = make(), make()
    step, optimizer = step_of(mine, loss_fn, size, **options), torch.optim.SGD(true.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        update = step(batch)
        optimizer.zero_grad()
        loss, extras = found if isinstance(found := loss_fn(true, on_device(batch)), tuple) else (found, None)
        loss.backward()
        optimizer.step()
        assert abs(update.loss.item() - loss.item()) < 1e-12
        assert extras is None or torch.allclose(update.extras, extras, rtol=0, atol=1e-12)
    assert apart(mine, true) < 1e-12
    return step


def whole(step: BigStep) -> Any:
    """Return the captured windows of a step; None where they cannot be captured."""
    return step._runner.whole


def gradient_of(network: nn.Module, batch: Batch, size: int, **options: Any) -> Tensor:
    """Return the gradient of a step in float64."""
    found: list[Tensor] = []
    step = step_of(network, size=size, lr=0.0, **options)
    step.before_step(lambda: found.extend(each.flatten().double() for each in gradients_of(network)))
    step(batch)
    return torch.cat(found)


@pytest.fixture(autouse=True)
def _all_are_worth_moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors are offloaded, too."""
    monkeypatch.setattr("bigbatch.lockstep.offload_store._WORTH_MOVING", 1024)


@pytest.mark.parametrize("activations", ["auto", "keep", "offload"])
@pytest.mark.parametrize("size", [1, 4, 5])
def test_batch_norm_is_the_big_batches(activations: str, size: int) -> None:
    """Weights and running statistics after several updates, from uneven micro-batches."""
    batches = [images(13, number) for number in range(4)]
    assert_big_batches(residual, cross_entropy, batches, size, activations=activations)


def checkpointed(model: Any, x: Tensor) -> Any:
    """Run the blocks under a checkpoint."""
    stem, *blocks, head = model.network
    x = stem(x)
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=model.reentrant)
    return head(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_inside_meet_again(reentrant: bool) -> None:
    """Both kinds of checkpoint run BatchNorm again in backward, where micro-batches meet again."""
    make = lambda: Model(checkpointed, network=residual(), reentrant=reentrant)  # noqa: E731
    assert_big_batches(make, cross_entropy, [images(13, n) for n in range(2)])


@pytest.mark.parametrize("activations", ["keep", "offload"])
@pytest.mark.parametrize("how", ["float32", "autocast", "channels last"])
def test_rounding_is_the_big_batchs_own(
    activations: str, how: str, record_property: Callable[[str, object], None]
) -> None:
    """Against float64, beside the whole batch in the same precision; half precision inside, channels behind."""
    batch = on_device(images(32, side=16))
    truth = gradient_of(residual(32), batch, 32)
    layout = torch.channels_last if how == "channels last" else torch.contiguous_format
    errors = []
    for size in (32, 9):
        network = residual(32, dtype=torch.float32).to(memory_format=layout)  # type: ignore[call-overload]
        with torch.autocast("cuda", torch.bfloat16, enabled=how != "float32"):
            low = batch[0].float().to(memory_format=layout), batch[1]
            found = gradient_of(network, low, size, activations=activations, check=False)
        errors.append(float((found - truth).norm() / truth.norm()))
    record_property("errors of gradients: full batch, micro-batches", errors)
    assert errors[1] < (4 * errors[0] + 1e-6 if how == "float32" else 2 * errors[0])


@pytest.mark.parametrize("activations", ["auto", "keep", "recompute", "offload"])
def test_a_contrastive_loss_is_the_big_batches(activations: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row against all, with a learned temperature."""
    monkeypatch.setattr("bigbatch.lockstep.offload_store._WORTH_MOVING", 64)
    assert_big_batches(lambda: twins().cuda(), clip, [rows(11, number) for number in range(3)], activations=activations)


def attending(dropout: float, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a layer of attention, and a temperature: (n, tokens, 32) → (n, 32)."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
    scale = nn.Parameter(torch.tensor(1.0))
    forward = lambda m, x: (unit(m.layer(x).mean(1)), m.scale.exp())  # noqa: E731
    return Model(forward, layer=layer, scale=scale).to("cuda", dtype)


def contrasted(network: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row against all; the rows are extras."""
    found, scale = network(x)
    return F.cross_entropy(scale * found @ across.gather(found).T, mine(found)), found


@pytest.mark.parametrize("tokens", [7, 32, 65])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("low", [False, True])
def test_attention_runs_again_as_it_ran(tokens: int, dropout: float, low: bool) -> None:
    """What its kernels save beside, as a seed that nobody has drawn, is not taken for another way."""

    def loss(network: nn.Module, x: Tensor) -> Any:
        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast("cuda", torch.bfloat16, enabled=low):
                found, scale = network(x)
            return found.float(), scale

        return contrasted(run, x)  # type: ignore[arg-type]

    step = step_of(attending(dropout), loss, activations="recompute")
    for _ in range(2):
        step(torch.randn(12, tokens, 32))


without_waiting = partial(residual, momentum=0.1)


@pytest.mark.parametrize("activations", ["keep", "offload"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_window_is_replayed_whole(activations: Any, layout: torch.memory_format) -> None:
    """Forward and backward of all micro-batches are one graph, copies to the host and back included."""
    make = lambda: without_waiting().to(memory_format=layout)  # type: ignore[call-overload]  # noqa: E731
    batches = [images(size, number) for number, size in enumerate([11, 11, 11, 9, 11, 9, 9])]
    step = assert_big_batches(make, cross_entropy, batches, activations=activations, cuda_graph=True)
    assert (whole(step).launches, whole(step).replays) == (2, 3)


@pytest.mark.parametrize("activations", ["auto", "keep"])
def test_a_contrastive_window_is_replayed_whole(activations: Any) -> None:
    """Also where the model runs twice; extras are copies."""
    by = torch.Generator().manual_seed(0)
    batches = [torch.randn(11, 7, 32, dtype=torch.float64, generator=by) for _ in range(5)]
    make = lambda: attending(0.0, torch.float64)  # noqa: E731
    step = assert_big_batches(make, contrasted, batches, activations=activations, cuda_graph=True)
    assert whole(step).replays == 3


def noisy(model: Any, x: Tensor) -> Tensor:
    """Add noise from a generator of the model's own."""
    return x + torch.rand(x.shape, generator=model.by, device=x.device, dtype=x.dtype)


UNCAPTURED: dict[str, Callable[[], nn.Module]] = {
    "a norm that waits": residual,
    "dropout": lambda: nn.Sequential(without_waiting(), nn.Dropout(0.5)),
    "own generator": lambda: nn.Sequential(without_waiting(), Model(noisy, by=torch.Generator("cuda").manual_seed(0))),
}


@pytest.mark.parametrize("what", UNCAPTURED)
def test_what_cannot_be_captured_is_launched(what: str) -> None:
    """A warning says why; the update is right."""
    torch.manual_seed(1)
    networks = [UNCAPTURED[what]() for _ in range(2)]
    for network, graph in zip(networks, (True, False), strict=True):
        step = step_of(network, cuda_graph=graph, activations="keep", check=False)
        with pytest.warns(UserWarning, match="cannot be captured as a CUDA graph") if graph else nullcontext():
            torch.manual_seed(2)
            for number in range(4):
                step(images(11, number))
        torch.rand(2, device="cuda")  # the generator is not in a capture
        assert whole(step) is None
    assert apart(*networks) < 1e-12


def test_graphs_of_others_keep_to_their_own_memory() -> None:
    """Whatever else is captured meanwhile, and gives memory back that matrix products work in."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 5)).cuda()
    steps = [step_of(network, cuda_graph=True) for network in (plain, without_waiting(dtype=torch.float32))]
    by = torch.Generator().manual_seed(0)
    vectors = torch.randn(12, 64, generator=by), torch.randint(5, (12,), generator=by)
    for _ in range(3):
        steps[0](vectors)
    for number in range(3):
        steps[1](images(11, number, dtype=torch.float32))
    torch.cuda.empty_cache()
    filled = [torch.ones(1 << 22, device="cuda") for _ in range(128)]
    for number in range(2):
        steps[0](vectors)
        steps[1](images(11, number, dtype=torch.float32))
    assert all(bool((each == 1).all()) for each in filled)
    assert all(whole(each) is not None for each in steps)


def test_a_replayed_window_under_autocast() -> None:
    """Casts of weights are made in every replay: they follow the weights."""

    def low(network: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(network(batch[0]).float(), batch[1])

    networks = [without_waiting(dtype=torch.float32) for _ in range(2)]
    for network, graph in zip(networks, (True, False), strict=True):
        step = step_of(network, low, cuda_graph=graph, activations="keep")
        for number in range(6):
            step(images(11, number, dtype=torch.float32))
        assert whole(step) is None or whole(step).replays == 4
    assert apart(*networks) < 1e-2


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_a_window_in_lock_step_waits_for_nothing(activations: str) -> None:
    """After the first windows no operation makes the host wait for the device."""
    network = without_waiting(dtype=torch.float32)
    optimizer, options = torch.optim.SGD(network.parameters(), lr=0.1), Options(activations=activations)  # type: ignore[arg-type]
    step = BigStep(network, optimizer, cross_entropy, micro_batch_size=4, clip_norm=1.0, options=options)
    batch = on_device(images(12, dtype=torch.float32))
    for _ in range(4):  # the fourth looks whether samples are coupled, and waits for that
        step(batch)
    torch.cuda.synchronize()
    with syncs() as found:
        step(batch)
    assert found == []
    assert (held_on_host(step) > 0) == (activations == "offload")


def test_offloading_frees_the_device(
    record_property: Callable[[str, object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of eight micro-batches peaks far below one that keeps all activations."""
    monkeypatch.undo()  # as it is
    peaks = {}
    for activations in ("keep", "offload"):
        network = residual(64, 6, torch.float32)
        step = step_of(network, size=64, activations=activations, check=False)
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
