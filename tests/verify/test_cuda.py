"""A proof on a GPU: kernels that drop, add up in any order and run out of memory of their own."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Options, verify
from tests.support import defects
from tests.support.defects import Batch, by_samples, mean, network, samples

pytestmark = pytest.mark.cuda
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def on_gpu(*layers: nn.Module) -> nn.Module:
    """A small model on the GPU; its samples are on the host."""
    return network(*layers).to("cuda")


def test_a_clean_model_is_proved() -> None:
    """Under BigStep, with samples on the host, and with BatchNorm that micro-batches meet at."""
    assert verify(on_gpu(), mean, samples(), 4).exact
    assert verify(on_gpu(nn.BatchNorm1d(8)), mean, samples(), 4).exact
    assert verify(on_gpu(), mean, samples(), 4, train_window=by_samples(mean)).exact


LAYERS = {
    "batch-norm": lambda: nn.BatchNorm1d(8),
    "randomness": lambda: nn.Dropout(0.5),
    "coupled-samples": defects.Attending,
    "state": defects.Fading,
}


@pytest.mark.parametrize("kind", LAYERS)
def test_causes_in_the_model_are_found_and_everything_is_as_it_was(kind: str) -> None:
    """By the same experiments as on a CPU; the generators of the GPU are as before, too."""
    model, batch = on_gpu(LAYERS[kind]()), samples()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.cuda.get_rng_state()
    found = verify(model, mean, batch, 4, options=Options(batch_norm="micro", check=False))
    assert [(cause.kind, cause.where) for cause in found.causes] == [(kind, "1")], str(found)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.cuda.get_rng_state(), state)


class Dropping(nn.Module):
    """Attention whose fused kernels drop by themselves, in half precision."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.mix, self.last = nn.Linear(64, 3 * 64), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within a sample."""
        q, k, v = (each.unflatten(-1, (2, 32)).transpose(1, 2) for each in self.mix(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return self.last(found.transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_inside_of_a_fused_attention_is_found(dtype: torch.dtype) -> None:
    """And without it the same model is proved."""
    batch = torch.randn(11, 128, 64, dtype=dtype), torch.randint(0, 3, (11,))
    found = verify(Dropping(0.2).to("cuda", dtype), mean, batch, 4)
    assert [cause.kind for cause in found.causes] == ["randomness"], str(found)
    assert verify(Dropping(0.0).to("cuda", dtype), mean, batch, 4).exact


class Scattering(nn.Module):
    """A kernel that adds up in any order, in the dtype that it is told."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype
        self.table, self.last = nn.Parameter(torch.randn(5, 8)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Look up many rows of a small table: their gradients meet by atomic additions."""
        rows = self.table.to(self.dtype or self.table.dtype)[(x.abs() * 7).long() % 5]
        return self.last(rows.mean(1).to(x.dtype))


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_kernels_that_add_up_in_any_order_are_rounding(dtype: torch.dtype | None) -> None:
    """No cause is named where the order of a sum is all that differs."""
    found = verify(Scattering(dtype).to("cuda"), mean, (torch.randn(64, 512), torch.randint(0, 3, (64,))), 24)
    assert found.exact, str(found)


def test_a_loop_with_half_precision_and_a_fused_optimizer() -> None:
    """The loss scale is taken out of what the kernel steps with."""

    def train_window(model: Any, micro_batches: list[Batch]) -> None:
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def lowered(model: Any, batch: Batch) -> Tensor:
            with torch.autocast("cuda", dtype=torch.float16):
                return scaler.scale(mean(model, batch))

        by_samples(lowered)(model, micro_batches)
        scaler.step(optimizer)
        scaler.update()

    found = verify(on_gpu(), mean, samples(), 4, train_window=train_window)
    assert found.exact, str(found)
    assert found.differences[0].own_floor > 1e-5  # the autocast's


def test_a_batch_that_does_not_fit_is_proved_in_part() -> None:
    """Really out of memory, of a device that lends no more."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.Tanh(), nn.Linear(4096, 3)).to("cuda")
    batch = torch.randn(8192, 1024), torch.randint(0, 3, (8192,))
    gc.collect()  # a captured graph in a cycle keeps its pool
    torch.cuda.empty_cache()
    there = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 640 * MIB) / there)
    try:
        found = verify(model, mean, batch, 256)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found.exact, str(found)
    assert 2 <= found.samples_proved < 8192
    assert f"the first {found.samples_proved:,} samples were compared" in str(found)
