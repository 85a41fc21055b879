"""What a forward of the first check shows: its memory and precision, its terms, and random numbers that repeat."""

import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bigbatch.loss.count import Term
from bigbatch.memory.meter import LiveBytes

# A bit of each weight, an eighth of it or less: flipped twice it is what it was, in no memory of its own.
_BITS = {
    torch.float64: (torch.int64, 1 << 49),
    torch.float32: (torch.int32, 1 << 20),
    torch.float16: (torch.int16, 1 << 7),
    torch.bfloat16: (torch.int16, 1 << 4),
}
_SMALL = 1 / 32  # the most that weights that are all zero are moved by
# Arguments of fused kernels that draw inside, and the values that keep them from it.
_CALM = {"dropout_p": 0.0, "dropout": 0.0, "train": False, "training": False}


class Rows(NamedTuple):
    """Which samples of a piece a part has."""

    start: int
    size: int
    of: int


class Watch(LiveBytes):
    """Watches a forward: its memory, the least precise numbers in it, and its random numbers, which it can repeat.

    A whole writes the numbers that it draws on a tape. Its part reads, at the same place, those of its own rows.
    """

    def __init__(self, tape: list[Tensor], rows: Rows | None) -> None:
        """Write on the tape, or read it for some rows."""
        super().__init__()
        self.lowest: torch.dtype | None = None
        self.certain = True
        self._tape, self._rows, self._place = tape, rows, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; numbers that are less precise than those it was given are rounded."""
        is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        result = super().__torch_dispatch__(partial(self._drawn, func) if is_random else func, types, args, kwargs)
        given = [torch.finfo(each.dtype).eps for each in tree_leaves((args, kwargs)) if _is_real(each)]
        for each in tree_leaves(result) if given else ():
            if _is_real(each) and torch.finfo(each.dtype).eps > max(min(given), self._eps()):
                self.lowest = each.dtype
        return result

    def _eps(self) -> float:
        return 0.0 if self.lowest is None else torch.finfo(self.lowest).eps

    def _drawn(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operation that draws random numbers."""
        names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001 - no public name
        calm = {name: value for name, value in _CALM.items() if name in names}
        if calm:
            return func(**{**dict(zip(names, args, strict=False)), **kwargs, **calm})
        source = kwargs.get("generator")
        generators = [source] if source is not None else _generators(args, kwargs)
        states = [each.get_state() for each in generators]
        result = func(*args, **kwargs)
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if self._rows is None:
            self._tape.extend(each.clone() for each in tensors)
            return result
        for each, state in zip(generators, states, strict=True):
            each.set_state(state)
        for each in tensors:
            place, self._place = self._place, self._place + 1
            known = place < len(self._tape) and "randperm" not in func.name()  # no part of an order is a part's order
            rows = self._own_rows(self._rows, self._tape[place], each) if known else None
            self.certain = self.certain and rows is not None
            if rows is not None:
                each.copy_(rows)
        return result

    def _own_rows(self, rows: Rows, whole: Tensor, part: Tensor) -> Tensor | None:
        """Return the numbers of a part's rows, where they can be told."""
        if whole.dim() != part.dim():
            return None
        for dim, (many, few) in enumerate(zip(whole.shape, part.shape, strict=True)):
            times = few // rows.size
            if many == few:
                continue
            if many * rows.size == few * rows.of:
                whole = whole.narrow(dim, rows.start * times, few)
                self.certain = self.certain and times == 1  # or samples lie one behind the other, or they do not
            elif few < many:
                whole, self.certain = whole.narrow(dim, 0, few), False  # trimmed, perhaps
            else:
                return None
        return whole


class Values(TorchFunctionMode):
    """Notes the numbers in a graph, so that each term of a loss is known by itself."""

    def __init__(self) -> None:
        """Know none yet."""
        super().__init__()
        self._of: dict[Node, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function and note its result, where that is one number."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel() == 1 and result.grad_fn is not None:
            self._of[result.grad_fn] = result.detach().clone()
        return result

    def of_terms(self, loss: Tensor, terms: Sequence[Term]) -> tuple[float, ...]:
        """Return what each term adds to a loss, which is linear in them; nothing where that cannot be told."""
        nodes = [term.node for term in terms if term.node is not None]
        values = [self._of.get(n) if term.value is None else term.value for term, n in zip(terms, nodes, strict=False)]
        known = [value for value in values if value is not None]
        if not terms or len(nodes) < len(terms) or len(known) < len(terms):
            return ()
        factors: Sequence[Tensor | None] = torch.autograd.grad(
            loss, [GradientEdge(n, 0) for n in nodes], retain_graph=True, allow_unused=True
        )
        # Of a term that is used twice, as in t + 0.5 * t, the first one stands for all.
        first = [node not in nodes[:place] for place, node in enumerate(nodes)]
        triples = zip(factors, known, first, strict=True)
        return tuple(float(f * value) if f is not None and is_first else 0.0 for f, value, is_first in triples)


def _generators(args: Any, kwargs: Any) -> list[torch.Generator]:
    """Return the default generators that an operation may draw from."""
    devices = {each.device for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
    devices |= {torch.device(kwargs["device"])} if kwargs.get("device") is not None else set()
    numbers = [device.index or 0 for device in devices if device.type == "cuda"]
    return [torch.default_generator, *(torch.cuda.default_generators[number] for number in numbers)]


def seed_differently() -> None:
    """Have all default generators draw other numbers from now on."""
    seed = (torch.initial_seed() + 1) % 2**32
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


@contextmanager
def quiet() -> Iterator[None]:
    """Drop warnings of pieces, as of a variance of one sample; the step gives its own.

    What is compiled runs as it is written: under a mode dynamo would give it up for good.
    """
    eagerly: Any = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with warnings.catch_warnings(), eagerly:
        warnings.simplefilter("ignore")
        yield


@contextmanager
def moved(models: Sequence[nn.Module]) -> Iterator[None]:
    """Move trained weights a little: what a loss of zero hides shows there.

    A flipped bit moves no zero: weights that are all zero, as of a head or an adapter that begins so, are filled.
    """
    weights = [p.data for p in dict.fromkeys(p for model in models for p in model.parameters() if p.requires_grad)]
    with ExitStack() as undoing:  # the latest first: weights may lie in each other
        undoing.callback(torch.clear_autocast_cache)
        for number, each in enumerate(weights):
            if type(each) is not Tensor or each.dtype not in _BITS or 0 in each.stride():  # one number for many
                continue
            dtype, bit = _BITS[each.dtype]
            bits = each.view(dtype)
            if bits.any():
                bits.bitwise_xor_(bit)
                undoing.callback(bits.bitwise_xor_, bit)
            else:
                undoing.callback(each.zero_)
                each.uniform_(-_SMALL, _SMALL, generator=torch.Generator(each.device).manual_seed(number))
        torch.clear_autocast_cache()
        yield


@contextmanager
def evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules into eval mode."""
    before = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in zip(modules, before, strict=True):
            module.training = training
