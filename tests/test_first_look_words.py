"""What the first step could not see is said of the case at hand: once, where it matters, with what helps."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, Options
from tests.reference import sgd, trained
from tests.samples import mlp, seeded

pytestmark = pytest.mark.filterwarnings("default:this loss draws random numbers:UserWarning")
Batch = tuple[Tensor, Tensor]


def batch(size: int, seed: int = 0) -> Batch:
    """Features and labels."""
    by = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, dtype=torch.float64, generator=by), torch.randint(4, (size,), generator=by)


def noisy(model: nn.Module, batch: Batch) -> Tensor:
    """Noise that no mode turns off."""
    x, labels = batch
    return F.cross_entropy(model(x) + torch.randn(len(x), 4, dtype=x.dtype), labels)


class Fails(nn.Module):
    """Noise in training, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()()

    def forward(self, x: Tensor) -> Tensor:
        """Noisy logits."""
        if not self.training:
            raise NotImplementedError
        found: Tensor = self.body(x + torch.randn_like(x))
        return found


def plain(model: nn.Module, batch: Batch) -> Tensor:
    """The model's own noise, if any."""
    return F.cross_entropy(model(batch[0]), batch[1])


def said(
    model: nn.Module, loss: Callable[[nn.Module, Batch], Tensor], sizes: list[int], options: Options | None = None
) -> list[list[str]]:
    """What each step warns of."""
    step = BigStep(model, sgd(trained(model)), loss, micro_batch_size=4, options=options or Options())
    heard: list[list[str]] = []
    for number, size in enumerate(sizes):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(batch(size, number))
        assert all(each.filename == __file__ for each in caught)
        heard.append([str(each.message) for each in caught])
    return heard


def test_noise_is_said_without_packing() -> None:
    """Where nothing is packed there is no padding to speak of."""
    first, second = said(mlp()(), noisy, [8, 8])
    assert second == []
    (words,) = first
    assert words.startswith("this loss draws random numbers that evaluation mode does not turn off")
    assert "could not see whether samples are coupled" in words
    assert "padding" not in words
    assert "packed" not in words
    assert "give them with the batch" in words
    assert "Options(check=False)" in words


def test_a_batch_in_one_piece_has_nothing_to_say() -> None:
    """Nothing is cut. When the first one is, it is said then."""
    assert [len(each) for each in said(mlp()(), noisy, [4, 3, 8, 8])] == [0, 0, 1, 0]


def test_a_model_that_fails_in_evaluation_mode_is_said_to() -> None:
    """With the error's name: it is not the random numbers alone."""
    ((words,),) = said(seeded(Fails)(), plain, [8])
    assert words.startswith("this loss draws random numbers, and in evaluation mode it fails (NotImplementedError)")
    assert "let the model run in evaluation mode" in words


def test_what_helps_does() -> None:
    """Noise that comes with the batch is looked at, and cut with it."""

    def given(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]) + batch[2], batch[1])

    model = mlp()()
    step = BigStep(model, sgd(trained(model)), given, micro_batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step((*batch(8), torch.randn(8, 4, dtype=torch.float64)))


def test_whoever_knows_is_told_nothing() -> None:
    """As the words say."""
    assert said(mlp()(), noisy, [8], Options(check=False)) == [[]]
