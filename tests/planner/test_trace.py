"""A traced peak is the real one, and tracing leaves nothing behind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.memory_prediction import cases, small_cnn
from benchmarks.models import perceptron, small_gpt
from benchmarks.peak_memory import peak_bytes
from bigbatch.errors import ConfigurationError, LossError
from bigbatch.memory.meter import LiveBytes
from bigbatch.planner.cuda_like import like_cuda
from bigbatch.planner.trace import Target, predict

Batch = tuple[Tensor, Tensor]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """A mean cross-entropy: one label a sample, or one a token."""
    logits = model(batch[0])
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), batch[1])


def half(model: nn.Module, batch: Batch) -> Tensor:
    """The same under autocast of the device that it runs on."""
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        return loss_fn(model, batch)


def with_dropout() -> nn.Sequential:
    """A model that draws."""
    return nn.Sequential(nn.Linear(784, 64), nn.Dropout(0.2), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 10))


def tokens(size: int) -> Batch:
    """Sequences of 64."""
    return torch.randint(65, (size, 64)), torch.randint(65, (size * 64,))


def features(size: int, *shape: int) -> Batch:
    """Flat images, or those of a shape."""
    return torch.randn(size, *(shape or (784,))), torch.randint(10, (size,))


TARGETS: tuple[Target, ...] = ("cpu", "cuda")
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], Callable[..., Tensor]]] = {
    "transformer": (small_gpt, tokens, loss_fn),
    "transformer, autocast": (small_gpt, tokens, half),
    "mlp": (perceptron, features, loss_fn),
    "cnn": (small_cnn, lambda size: features(size, 3, 64, 64), loss_fn),
    "dropout and batch norm": (with_dropout, features, loss_fn),
}


@pytest.mark.parametrize("size", [2, 16])
@pytest.mark.parametrize(("make", "samples", "loss"), MODELS.values(), ids=MODELS)
def test_a_traced_peak_is_what_tensors_take(
    make: Callable[[], nn.Module], samples: Callable[[int], Batch], loss: Callable[..., Tensor], size: int
) -> None:
    """Byte for byte what operations return on a real CPU."""
    model, batch = make(), samples(size)
    traced = predict(model, loss, batch, target="cpu")
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with LiveBytes() as live:
        loss(model, batch).backward()
    assert max(traced.forward, traced.backward) == live.peak
    assert traced.weights == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert traced.gradients == sum(p.nbytes for p in model.parameters())


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), 0),
    "momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
    "adamw": (lambda p: torch.optim.AdamW(p, fused=True), 2),
    "adamw, foreach": (lambda p: torch.optim.AdamW(p, foreach=True), 2),
    "amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
}


@pytest.mark.parametrize(("make", "copies"), OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("stepped", [False, True])
def test_optimizer_state_is_counted_before_it_is_there(
    make: Callable[[Any], torch.optim.Optimizer], copies: int, stepped: bool
) -> None:
    """As the real state, whether the optimizer has stepped or not; and a step never counts it twice."""
    model = perceptron()
    optimizer = make(model.parameters())
    if stepped:
        loss_fn(model, features(2)).backward()
        optimizer.step()
    traced = predict(model, loss_fn, features(2), optimizer, target="cpu")
    weights = sum(p.nbytes for p in model.parameters())
    assert abs(traced.optimizer_state - copies * weights) < 1000  # counts of steps
    assert bool(optimizer.state) == (stepped and copies > 0)


def test_a_foreach_step_has_temporaries_on_cuda() -> None:
    """On CUDA torch takes foreach kernels unasked, and at size 1 they can be the peak."""
    model = perceptron()
    plain = predict(model, loss_fn, features(1), torch.optim.AdamW(model.parameters()))
    fused = predict(model, loss_fn, features(1), torch.optim.AdamW(model.parameters(), fused=True))
    assert plain.optimizer_step >= plain.weights
    assert fused.optimizer_step < 10_000
    assert plain.peak == plain.resident + plain.optimizer_step


def test_tracing_leaves_no_attributes_behind_and_allocates_nothing() -> None:
    """That a forward sets; a batch that no machine holds can be traced, and the model still trains."""

    class Caching(nn.Linear):
        cache: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.cache = super().forward(x)
            return self.cache

    model, batch = Caching(784, 10), features(4)
    predict(model, loss_fn, batch, torch.optim.AdamW(model.parameters()))
    wide = torch.empty(1, 784).expand(1 << 36, 784)
    assert predict(model, lambda m, b: m(b).sum(), wide).peak > 1 << 41
    assert model.cache is None
    loss_fn(model, batch).backward()


def attend(model: nn.Module, x: Tensor) -> Tensor:
    """Attention with dropout."""
    heads = model(x).unflatten(-1, (4, -1)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1).sum()


def test_what_a_cpu_keeps_and_cuda_does_not() -> None:
    """Attention's square matrix, with dropout; three of four bytes of dropout's own mask."""
    model, x = nn.Linear(64, 64), torch.empty(1, 2048, 64)
    square = 4 * 4 * 2048 * 2048
    assert predict(model, attend, x, target="cpu").backward > square
    assert predict(model, attend, x).backward < square / 8
    model, x = nn.Linear(8, 1024), torch.empty(1024, 8)
    cpu, cuda = (predict(model, lambda m, x: F.dropout(m(x), 0.5).sum(), x, target=t).forward for t in TARGETS)
    assert 3 << 20 <= cpu - cuda < 4 << 20


def test_autocast_acts_as_on_cuda() -> None:
    """Norms and losses in float32, a cross-entropy's softmax in half, `torch.autocast("cuda")` without a GPU."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            y = model(x)
            assert y.dtype == torch.bfloat16
            assert F.layer_norm(y, (8,)).dtype == torch.float32
            assert F.softmax(y, -1).dtype == torch.float32
            assert F.log_softmax(y, -1, dtype=torch.bfloat16).dtype == torch.bfloat16
            assert (y.sum().dtype, y.sum(0).dtype, y.exp().dtype) == (torch.float32,) * 3
            return F.cross_entropy(y, x.long().amax(-1))

    def look(model: nn.Module, x: Tensor) -> Tensor:
        assert model(x).dtype == torch.bfloat16
        return model(x).sum()

    assert predict(nn.Linear(8, 8), losses, torch.empty(4, 8)).peak > 0
    with torch.autocast("cpu", torch.bfloat16):
        predict(nn.Linear(8, 8), look, torch.empty(4, 8))  # the one around the call holds inside
        with pytest.raises(ZeroDivisionError), like_cuda():
            raise ZeroDivisionError
        # And all is as before.
        y = torch.ones(2, 8, dtype=torch.bfloat16)
        assert F.softmax(y, -1).dtype == torch.bfloat16
        assert F.dropout(torch.ones(3), 0.0).sum() == 3


def test_what_hangs_on_numbers_is_refused() -> None:
    """A mask is traced as all true, the most it can be; a shape by a number is an error."""

    def masked(model: nn.Module, batch: Batch) -> Tensor:
        kept = model(batch[0])[batch[1] > 0]
        return kept.sum() + model(batch[0]).masked_select(batch[1][:, None] > 0).mean() * float(kept.mean())

    assert predict(nn.Linear(784, 10), masked, features(8), target="cpu").peak > 0

    def cut(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0])[: int(batch[1].max())].sum()

    with pytest.raises(ConfigurationError, match=r"reads an integer out of a tensor[\s\S]*on the device itself"):
        predict(nn.Linear(784, 10), cut, features(8))
    with pytest.raises(LossError, match=r"the loss must be a tensor; found float"):
        predict(nn.Linear(784, 10), lambda _m, _b: 1.0, features(8))


def test_a_gpt_of_124_million_as_measured_on_an_h200() -> None:
    """Three updates of micro-batches of 4 peaked at 5,708,120,064 bytes there (benchmarks/results/overhead-cuda.md)."""
    case = cases("cuda")[0]
    with torch.device("meta"):
        model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    traced = predict(model, case.loss, case.batch(4, "cpu"), optimizer)
    assert abs((traced.peak - traced.batch - traced.workspaces) / 5_708_120_064 - 1) < 0.02


@pytest.mark.cuda
@pytest.mark.parametrize(("make", "samples", "loss"), MODELS.values(), ids=MODELS)
def test_a_gpu_takes_what_was_predicted(
    make: Callable[[], nn.Module], samples: Callable[[int], Batch], loss: Callable[..., Tensor]
) -> None:
    """Within 10 %, workspaces apart, at a size where activations are most of it."""
    model = make().to("cuda")
    batch = tuple(t.to("cuda") for t in samples(256))
    loss(model, batch).backward()
    traced = predict(model, loss, batch)
    _, real = peak_bytes(lambda: loss(model, batch).backward(), "cuda")
    assert abs(max(traced.forward, traced.backward) / real - 1) < 0.10
