"""What the first check could not see is said: once, where it matters, with what helps."""

import random
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import BigStep, Options
from tests.support.reference import sgd, trained
from tests.support.samples import mlp

Batch = tuple[Tensor, Tensor]


def batch(size: int, seed: int = 0) -> Batch:
    """Features and labels."""
    by = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, dtype=torch.float64, generator=by), torch.randint(4, (size,), generator=by)


def mixed(model: nn.Module, batch: Batch) -> Tensor:
    """Each sample mixed with another one, as mixup does: no part of an order is the order of a part."""
    x, labels = batch
    return F.cross_entropy(model(x + 0.3 * x[torch.randperm(len(x))]), labels)


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


def test_numbers_that_cannot_be_drawn_again_are_said_once() -> None:
    """Where nothing is packed there is no padding to speak of."""
    first, *others = said(mlp()(), mixed, [8] * 5)
    assert others == [[]] * 4
    (words,) = first
    assert words.startswith("this loss draws random numbers that cannot be drawn again for a part of a batch")
    assert "could not see, in training mode, whether samples are coupled" in words
    assert "a row for each sample of the batch" in words
    assert "Options(check=False)" in words


def test_a_batch_in_one_piece_has_nothing_to_say() -> None:
    """Nothing is cut. When the first one is, it is said then."""
    assert [len(each) for each in said(mlp()(), mixed, [4, 3, 8, 8])] == [0, 0, 1, 0]


def test_whoever_knows_is_told_nothing() -> None:
    """As the words say."""
    assert said(mlp()(), mixed, [8], Options(check=False)) == [[]]


def test_numbers_of_one_sample_after_the_other_go_on() -> None:
    """Python's numbers, drawn for the batch or for each sample: there is nothing to say."""

    def for_each(model: nn.Module, batch: Batch) -> Tensor:
        factors = torch.tensor([random.uniform(0.5, 2) for _ in batch[0]], dtype=torch.float64)  # noqa: S311
        return F.cross_entropy(model(batch[0] * factors[:, None]), batch[1])

    def for_all(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0] * random.uniform(0.5, 2)), batch[1])  # noqa: S311

    assert said(mlp()(), for_each, [8, 8]) == [[], []]
    assert said(mlp()(), for_all, [8, 8]) == [[], []]
