"""`BigStep` on a GPU: captured, cast once, moved aside, out of memory for real; always the big batch's gradient."""

import copy
import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbatch import BigStep, Options, errors
from bigbatch.execute import precast
from tests.support.emulated_graphs import captures
from tests.support.packed import LOSSES, attentive
from tests.support.packed import text as ragged_text
from tests.support.reference import trained
from tests.test_cuda import (
    OPTIMIZERS,
    Batch,
    Loss,
    batches,
    cross_entropy,
    distance,
    given,
    model,
    squares,
    syncs,
    train_big,
    two_heads,
    weighted,
)

pytestmark = pytest.mark.cuda


@pytest.fixture(params=["short", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Mixed precision the short way for layers of any size, or as it is for these small ones."""
    if request.param == "short":
        monkeypatch.setattr(precast, "_LARGE_TABLE", 0)
    return str(request.param)


def several(network: nn.Module, batch: Batch) -> Tensor:
    """Two terms with counts of their own."""
    out = network(batch[0])
    return F.cross_entropy(out, batch[1]) + 0.1 * out.square().mean()


def total(network: nn.Module, batch: Batch) -> Tensor:
    """A sum."""
    return F.cross_entropy(network(batch[0]), batch[1], reduction="sum")


def steps(network: nn.Module, data: list[Batch], loss: Loss, make: Callable[..., Any], **options: Any) -> list[Any]:
    """Make one update of each batch."""
    step = BigStep(network, make(network.parameters()), loss, **options)
    return [step(batch) for batch in data]


def sgd_step(network: nn.Module, loss: Any, size: int, *, lr: float, **options: Any) -> BigStep:
    """A step with SGD."""
    optimizer = torch.optim.SGD(network.parameters(), lr=lr)
    return BigStep(network, optimizer, loss, micro_batch_size=size, options=Options(**options))


@pytest.mark.parametrize("where", ["cpu", "cuda", "pinned"])
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("loss", [cross_entropy, two_heads, weighted, squares, given, several, total])
def test_a_step_is_the_big_batch(
    loss: Loss, make: Callable[..., Any], clip: float | None, cuda_graph: bool, where: str
) -> None:
    """Weights after four updates equal those of the real big batches, in float64, eager and captured."""
    data = batches([21, 21, 13, 21])
    mine, true = model(), model()
    given_data = data if where == "cuda" else [(x.cpu(), y.cpu()) for x, y in data]
    if where == "pinned":
        given_data = [(x.pin_memory(), y.pin_memory()) for x, y in given_data]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these losses cannot be captured, which is said
        updates = steps(
            mine, given_data, loss, make, micro_batch_size=4, clip_norm=clip, options=Options(cuda_graph=cuda_graph)
        )
    losses = train_big(true, data, loss, make, 1, clip)
    assert distance(mine, true) < 1e-12
    assert [update.micro_batches for update in updates] == [6, 6, 4, 6]
    if loss is cross_entropy:
        assert [float(update.loss) for update in updates] == pytest.approx(losses, rel=1e-12)


@pytest.mark.parametrize("micro_batches", [4, 20])
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("loss", [cross_entropy, squares])
def test_a_step_waits_for_no_stream_and_no_device(
    loss: Loss, cuda_graph: bool, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches on the host, pinned or not. Only for events: that inputs were used, from the ninth micro-batch on."""
    network = model(torch.float32)
    optimizer = OPTIMIZERS["adamw-fused"](network.parameters())
    options = Options(cuda_graph=cuda_graph)
    step = BigStep(network, optimizer, loss, micro_batch_size=20 // micro_batches, clip_norm=1.0, options=options)
    host = [tuple(leaf.cpu() for leaf in batch) for batch in batches([20] * 3, torch.float32)]
    for _, labels in host:
        labels[0] = 0  # where the first micro-batch counts nothing, the device is asked whether the others do
    pinned = [tuple(leaf.pin_memory() for leaf in batch) for batch in host]
    for batch in (*host, *pinned):
        step(batch)
    torch.cuda.synchronize()
    waits: list[torch.cuda.Event] = []
    wait = torch.cuda.Event.synchronize

    def counting(event: torch.cuda.Event) -> None:
        waits.append(event)
        wait(event)

    monkeypatch.setattr(torch.cuda.Event, "synchronize", counting)
    with syncs() as found:
        for batch in (*host, *pinned):
            step(batch)
    assert found == []
    per_step = max(micro_batches - 8, 0)
    # Beside them, the first count where it is on the device, and what was read of the user's own pinned memory.
    assert 6 * per_step <= len(waits) <= 6 * (per_step + 2)


class Tower(nn.Module):
    """Embeddings, biased and unbiased linear layers, a tied head: all that the short way of mixed precision takes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(96, 64)
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64, bias=False)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits for each place."""
        hidden = self.tokens(x)
        hidden = hidden + self.down(F.gelu(self.up(self.norm(hidden))))
        return F.linear(self.norm(hidden), self.tokens.weight)


def places(network: nn.Module, batch: Batch) -> Tensor:
    """The mean over all places, a third of them ignored."""
    return F.cross_entropy(network(batch[0]).flatten(0, 1), batch[1].flatten())


def text(samples: int = 24, seed: int = 0) -> Batch:
    """Return tokens and labels on the host."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 96, (samples, 16), generator=generator)
    y = torch.where(torch.rand(x.shape, generator=generator) < 0.3, -100, x.roll(-1, 1))
    return x, y


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast_inside", [False, True])
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_mixed_precision_is_no_less_precise_than_the_plain_way(
    cuda_graph: bool, autocast_inside: bool, dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    """Against a float64 reference: the error is at most that of autocast over the full batch and over micro-batches."""
    torch.manual_seed(0)
    network = Tower().cuda()
    batch = text()
    exact = copy.deepcopy(network).double()
    places(exact, tuple(leaf.cuda() for leaf in batch)).backward()  # type: ignore[arg-type]
    truth = torch.cat([p.grad.flatten() for p in exact.parameters()])  # type: ignore[union-attr]

    def plain(size: int) -> Tensor:
        twin = copy.deepcopy(network)
        x, y = (leaf.cuda() for leaf in batch)
        tokens = (y != -100).sum()
        for start in range(0, len(x), size):
            with torch.autocast("cuda", dtype):
                out = twin(x[start : start + size])
                loss = F.cross_entropy(out.flatten(0, 1), y[start : start + size].flatten(), reduction="sum") / tokens
            loss.backward()
        return torch.cat([p.grad.flatten().double() for p in twin.parameters()])  # type: ignore[union-attr]

    def loss_fn(network: nn.Module, micro_batch: Batch) -> Tensor:
        with torch.autocast("cuda", dtype) if autocast_inside else nullcontext():
            return places(network, micro_batch)

    twin = copy.deepcopy(network)
    seen: list[Tensor] = []
    step = sgd_step(twin, loss_fn, 4, lr=0.0, cuda_graph=cuda_graph)
    step.before_step(lambda: seen.append(torch.cat([p.grad.flatten().double() for p in twin.parameters()])))  # type: ignore[union-attr]
    for _ in range(3):
        with nullcontext() if autocast_inside else torch.autocast("cuda", dtype):
            step(batch)
    errors_of = [float((gradient - truth).norm() / truth.norm()) for gradient in seen]
    plainly = [float((plain(size) - truth).norm() / truth.norm()) for size in (4, len(batch[0]))]
    record_property("errors", f"{errors_of} against {plainly} of micro-batches and the full batch")
    assert max(errors_of) <= 1.05 * max(plainly)
    assert F.linear is torch._C._nn.linear
    assert ("steps" in captures(step)) == cuda_graph  # it was not given up on the way


@pytest.mark.usefixtures("way")
def test_hooks_on_parameters_still_see_their_gradients() -> None:
    """A parameter with a hook goes the usual way."""
    torch.manual_seed(0)
    network = Tower().cuda()
    seen: list[torch.Size] = []
    network.up.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    network.tokens.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
    step = sgd_step(network, places, 8, lr=0.1)
    with torch.autocast("cuda", torch.bfloat16):
        step(text())
    assert seen.count(network.up.weight.shape) == 3
    assert seen.count(network.tokens.weight.shape) >= 3


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_weights_are_cast_anew_after_every_update(cuda_graph: bool) -> None:
    """Also inside one autocast that spans many steps, whose own cache would be stale."""
    losses = {}
    for spanning in (True, False):
        torch.manual_seed(0)
        network = Tower().cuda()
        step = sgd_step(network, places, 8, lr=0.5, cuda_graph=cuda_graph)
        if spanning:
            with torch.autocast("cuda", torch.bfloat16):
                found = [step(text()) for _ in range(6)]
        else:
            found = []
            for _ in range(6):
                with torch.autocast("cuda", torch.bfloat16):
                    found.append(step(text()))
        losses[spanning] = [float(update.loss) for update in found]
    assert losses[True] == pytest.approx(losses[False], rel=2e-3)
    assert losses[True][-1] < losses[True][0] - 0.1


def test_what_cannot_be_captured_is_said_once_and_done_all_the_same() -> None:
    """A forward that waits for the device falls back to launching, with a warning."""

    def waiting(network: nn.Module, batch: Batch) -> Tensor:
        assert float(batch[0].sum()) == float(batch[0].sum())
        return cross_entropy(network, batch)

    data = batches([16] * 4)
    mine, true = model(), model()
    with pytest.warns(UserWarning, match="cannot be captured") as caught:
        steps(mine, data, waiting, OPTIMIZERS["sgd"], micro_batch_size=4, options=Options(cuda_graph=True))
    assert len(caught) == 1
    train_big(true, data, cross_entropy, OPTIMIZERS["sgd"], 1, None)
    assert distance(mine, true) < 1e-12
    # A capture that was given up leaves nothing behind: not its stream, nor its hold on the allocator.
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    before = torch.cuda.memory_reserved()
    block = torch.empty(1 << 28, device="cuda")
    del block
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


def penalised(network: Any, batch: Batch) -> Tensor:
    """A backward inside the loss must not add to the window's gradients."""
    hidden = network.tokens(batch[0])
    out = network.down(network.up(hidden))
    slope = torch.autograd.grad(out.float().sum(), hidden, create_graph=True)[0]
    return slope.square().sum((1, 2)).mean()


def hooked(network: Any, batch: Batch) -> Tensor:
    """A hook that differentiates on its own, as a fixed-point layer has it, adds nothing."""
    hidden = network.norm(network.tokens(batch[0]))
    out = network.down(network.up(hidden))

    def hook(gradient: Tensor) -> Tensor:
        with torch.enable_grad(), torch.autocast("cuda", torch.bfloat16):
            start = hidden.detach().requires_grad_()
            again = network.down(network.up(start))
            return gradient + 0.1 * torch.autograd.grad(again, start, gradient)[0].to(gradient.dtype)

    out.register_hook(hook)
    found: Tensor = out.float().square().mean()
    return found


def checkpointed(network: Any, batch: Batch, *, use_reentrant: bool) -> Tensor:
    """Layers that are recomputed on another thread."""

    def middle(x: Tensor) -> Tensor:
        found: Tensor = network.down(F.gelu(network.up(network.norm(x))))
        return found

    hidden = network.tokens(batch[0])
    hidden = hidden + checkpoint(middle, hidden, use_reentrant=use_reentrant)
    return F.cross_entropy(F.linear(hidden, network.tokens.weight).flatten(0, 1), batch[1].flatten())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "loss",
    [
        penalised,
        hooked,
        partial(checkpointed, use_reentrant=False),
        partial(checkpointed, use_reentrant=True),
    ],
)
def test_the_short_way_is_taken_where_it_serves(loss: Any) -> None:
    """Whatever a loss does beside: it is the big batch's update, but for bf16 in another order."""
    torch.manual_seed(0)
    network, batch = Tower().cuda(), text()
    twin = copy.deepcopy(network)
    step = sgd_step(network, loss, 8, lr=0.1)
    with torch.autocast("cuda", torch.bfloat16):
        step(batch)
        loss(twin, tuple(leaf.cuda() for leaf in batch)).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert distance(network, twin) < 5e-3


@pytest.mark.usefixtures("way")
def test_a_regulariser_of_weights_counts_once() -> None:
    """A product of two parameters is no data, though it goes through the layer of ours."""
    torch.manual_seed(0)
    network = nn.Linear(16, 16, bias=False).cuda()
    twin = copy.deepcopy(network)

    def loss_fn(network: Any, x: Tensor) -> Tensor:
        twice = F.linear(network.weight, network.weight).float()
        found: Tensor = network(x).float().square().sum() + 3 * twice.square().sum()
        return found

    x = torch.randn(12, 16)
    step = sgd_step(network, loss_fn, 4, lr=1e-3)
    with torch.autocast("cuda", torch.bfloat16):
        step(x)
        loss_fn(twin, x.cuda()).backward()
    torch.optim.SGD(twin.parameters(), lr=1e-3).step()
    assert distance(network, twin) < 5e-3


@pytest.mark.usefixtures("way")
def test_padding_of_an_embedding_stays_untrained() -> None:
    """`padding_idx` keeps its row without gradient."""
    torch.manual_seed(0)
    table = nn.Embedding(96, 8, padding_idx=0).cuda()
    both = nn.Sequential(table, nn.Linear(8, 1).cuda())
    before = table.weight.detach().clone()
    step = sgd_step(both, lambda network, x: (network(x) - 1).square().mean(), 2, lr=1.0)
    with torch.autocast("cuda", torch.bfloat16):
        step(torch.tensor([[0, 1], [0, 2], [3, 0], [0, 0]]))
    assert torch.equal(before[0], table.weight[0])
    assert not torch.equal(before[1], table.weight[1])


@pytest.mark.parametrize("loss", ["tokens", "sequences"])
@pytest.mark.parametrize("host", [False, True])
def test_packed_micro_batches_are_replayed_and_exact(loss: str, host: bool) -> None:
    """Trimmed to a few widths, full ones captured when they come again, the last one launched: the batch as it came."""
    random = torch.Generator().manual_seed(0)
    mine, true = attentive().cuda(), attentive().cuda()
    optimizer = OPTIMIZERS["sgd"](trained(true))
    options = Options(lengths="attention_mask", token_budget=96, cuda_graph=True)
    step = BigStep(mine, OPTIMIZERS["sgd"](trained(mine)), LOSSES[loss], options=options)
    for number in range(8):
        lengths = torch.randint(1, 60, (40,), generator=random).tolist()
        batch = ragged_text(lengths, number, 4)
        there = {key: value.cuda() for key, value in batch.items()}
        step(batch if host else there)
        optimizer.zero_grad()
        LOSSES[loss](true, there).backward()
        optimizer.step()
        assert distance(mine, true) < 1e-12
    graphs = step._runner.steps
    assert graphs is not None
    assert graphs.replays > graphs.launches > 0


@pytest.mark.usefixtures("way")
def test_autocast_that_is_switched_on_later_is_captured_anew() -> None:
    """Launched once in the new state, so that its weights are cast before the capture; nothing is given up."""
    torch.manual_seed(0)
    network = Tower().cuda()
    twin = copy.deepcopy(network)

    def step_of(module: nn.Module, *, cuda_graph: bool) -> BigStep:
        optimizer, options = torch.optim.SGD(module.parameters(), lr=0.1), Options(cuda_graph=cuda_graph)
        return BigStep(module, optimizer, places, micro_batch_size=4, options=options)

    mine, plain = step_of(network, cuda_graph=True), step_of(twin, cuda_graph=False)
    for lowered in (False, False, True, True, False, True):
        for step in (mine, plain):
            with torch.autocast("cuda", torch.bfloat16, enabled=lowered):
                step(text())
    assert distance(network, twin) < 5e-3
    graphs = mine._runner.steps
    assert graphs is not None
    assert graphs.captures == 4


def test_captured_dropout_draws_new_masks() -> None:
    """Each replay draws its own numbers, and the mean over many is that of training without a graph."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 7)).cuda()

    def loss_fn(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        out = network(batch[0])
        return F.cross_entropy(out, batch[1]), out

    x, y = batches([4], torch.float32)[0]
    batch = (x.repeat(4, 1), y.clamp(min=0).repeat(4))
    step = sgd_step(network, loss_fn, 4, lr=0.0, cuda_graph=True)
    outputs = [step(batch).extras for _ in range(4)]
    parts = [part for out in outputs for part in out.split(4)]
    assert all(not torch.equal(parts[0], part) for part in parts[1:])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_scaler_works(cuda_graph: bool) -> None:
    """fp16 with a scaler: unscaled once, close to float32."""
    torch.manual_seed(0)
    network = Tower().cuda()
    twin = copy.deepcopy(network)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12)
    step = BigStep(
        network,
        torch.optim.SGD(network.parameters(), lr=0.5),
        places,
        micro_batch_size=8,
        clip_norm=1.0,
        scaler=scaler,
        options=Options(cuda_graph=cuda_graph),
    )
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.5)
    for _ in range(4):
        with torch.autocast("cuda", torch.float16):
            update = step(text())
        assert not update.skipped
        places(twin, tuple(leaf.cuda() for leaf in text())).backward()  # type: ignore[arg-type]
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert distance(network, twin) < 2e-3


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:TensorFloat32")  # torch's own, while compiling
def test_a_compiled_model_works() -> None:
    """What the user has compiled stays compiled."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 7)).cuda()
    twin = copy.deepcopy(network)
    compiled: Any = torch.compile(network)
    data = batches([16] * 2, torch.float32)
    step = BigStep(compiled, torch.optim.SGD(network.parameters(), lr=0.1), cross_entropy, micro_batch_size=8)
    for batch in data:
        step(batch)
    train_big(twin, data, cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1), 1, None)
    assert distance(network, twin) < 1e-5


def wide(width: int = 4096, layers: int = 12) -> nn.Module:
    """Return a network whose activations are large: 16 KiB a row and layer."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))).cuda()


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_running_out_of_memory_for_real_loses_nothing(cuda_graph: bool) -> None:
    """Capped memory: the first sizes fail, the step succeeds, and equals one that never failed."""
    _, total_bytes = torch.cuda.mem_get_info()
    torch.manual_seed(1)
    batch = torch.randn(16384, 4096)

    def loss_fn(network: nn.Module, x: Tensor) -> Tensor:
        return network(x).square().mean()

    def trained(size: int, cap: float | None) -> tuple[nn.Module, Any, BigStep]:
        network = wide()
        torch.cuda.empty_cache()
        if cap is not None:
            torch.cuda.set_per_process_memory_fraction(cap / total_bytes)
        try:
            step = sgd_step(network, loss_fn, size, lr=0.1, cuda_graph=cuda_graph)
            updates = [step(batch) for _ in range(3)]
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return network, updates, step

    mine, updates, step = trained(16384, 4.0 * 2**30)
    learned = next(iter(step.state_dict()["sizes"].values()))["size"]
    assert learned < 16384
    true, _, _ = trained(learned, None)
    assert distance(mine, true) < 1e-6
    assert updates[0].micro_batches > 1
    with pytest.raises(errors.OutOfMemory, match="one sample"):
        trained(1, 0.9 * 2**30 + torch.cuda.memory_allocated())


def test_auto_stays_within_the_budget(record_property: Callable[[str, object], None]) -> None:
    """The size that "auto" finds fits the budget it was given."""
    gc.collect()
    torch.cuda.empty_cache()
    budget = torch.cuda.memory_reserved() + 3 * 2**30  # beside what the tests before have left
    network = wide(2048, 16)
    batch = torch.randn(8192, 2048)
    step = BigStep(
        network,
        torch.optim.AdamW(network.parameters(), fused=True),
        lambda network, x: network(x).square().mean(),
        memory=budget,
    )
    step(batch)
    torch.cuda.reset_peak_memory_stats()
    update = step(batch)
    peak = torch.cuda.max_memory_allocated()
    record_property(
        "auto", f"{update.micro_batches} micro-batches, peak {peak / 2**30:.2f} of {budget / 2**30:.2f} GiB"
    )
    assert peak <= budget


def test_a_step_that_is_gone_holds_no_memory() -> None:
    """Graphs and their memory go with the step that captured them."""
    held = []
    for _ in range(3):
        network = wide(2048, 4)
        step = sgd_step(network, lambda network, x: network(x).square().mean(), 2048, lr=0.1, cuda_graph=True)
        for _ in range(3):
            step(torch.randn(8192, 2048))
        del step, network
        gc.collect()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    assert held[2] <= held[0]
