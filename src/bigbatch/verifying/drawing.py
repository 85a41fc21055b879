"""Random numbers: who draws them, and what a model does where each draw is its own mean."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_FRACTIONS = ("dropout_p", "dropout")  # arguments by which attention and recurrent layers drop on their way
_SWITCHES = ("training", "train")


class Draws(TorchDispatchMode):
    """Notes whoever draws; where it is to be `still`, each number is its distribution's mean, whoever asks for it.

    So dropout multiplies by one, noise is a constant, and a permutation is none. It acts below autograd, so it also
    holds in a backward that recomputes, and on the threads of a lock-step.
    """

    def __init__(self, whose: Callable[[], str] = lambda: "", *, still: bool = False) -> None:
        """Have seen nothing yet; `whose` names the module that runs."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._whose, self._still = whose, still
        self.seen: dict[str, str] = {}  # the operation, by the module that drew

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call what was called, or what stands for it."""
        del types
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.detach.default and not isinstance(args[0], Tensor):
            return torch.tensor(args[0])  # a number in a graph, which torch hands to a mode as it is
        given = _given(func, args, kwargs)
        dropping = next((name for name in _FRACTIONS if isinstance(given.get(name), float)), None)
        if dropping is not None and given[dropping]:
            self.seen.setdefault(self._whose(), str(func).partition(".")[2])
            if self._still:
                args, kwargs = _replaced(func, args, kwargs, dropping, 0.0)
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags or dropping is not None:
            return func(*args, **kwargs)
        if any(given.get(name) is False for name in _SWITCHES):
            return func(*args, **kwargs)
        self.seen.setdefault(self._whose(), func.overloadpacket.__name__)
        if self._still:
            mean = _MEANS.get(func.overloadpacket.__name__)
            found = mean(func, args, kwargs, given) if mean is not None else None
            if found is not None:
                return found
        return func(*args, **kwargs)


def _given(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by their names, with what it takes where nothing is given."""
    arguments = func._schema.arguments  # noqa: SLF001 - an operation has no other signature
    usual = {each.name: each.default_value for each in arguments if each.has_default_value()}
    return {**usual, **dict(zip((each.name for each in arguments), args, strict=False)), **kwargs}


def _replaced(func: Any, args: Any, kwargs: dict[str, Any], name: str, value: float) -> tuple[Any, dict[str, Any]]:
    names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001
    place = names.index(name)
    if place < len(args):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}


def _filled(value: Callable[[dict[str, Any]], float]) -> Callable[..., Any]:
    """Have the operation make its tensor, and fill it."""

    def mean(func: Any, args: Any, kwargs: Any, given: dict[str, Any]) -> Any:
        made = func(*args, **kwargs)
        return made.fill_(value(given)) if isinstance(made, Tensor) else None

    return mean


def _bernoulli(func: Any, args: Any, kwargs: Any, given: dict[str, Any]) -> Any:
    chance = given["p"] if given.get("p") is not None else given["self"]
    made = func(*args, **kwargs)
    if isinstance(chance, Tensor):
        return made.copy_(chance if made.is_floating_point() else chance >= 0.5)  # noqa: PLR2004 - the likelier
    return made.fill_(chance if made.is_floating_point() else float(chance >= 0.5))  # noqa: PLR2004


def _itself(func: Any, args: Any, kwargs: Any, given: dict[str, Any]) -> Any:
    """A Poisson number's mean is its rate, a gamma's its concentration."""
    del func, args, kwargs
    return given["self"].clone()


def _dropout(func: Any, args: Any, kwargs: Any, given: dict[str, Any]) -> Any:
    """Drop nothing; its backward scales as if it had, so it does too."""
    del func, args, kwargs
    x, p = given["input"], given["p"]
    return x / (1 - p) if p < 1 else torch.zeros_like(x), torch.ones_like(x, dtype=torch.bool)


def _likeliest(func: Any, args: Any, kwargs: Any, given: dict[str, Any]) -> Any:
    del func, args, kwargs
    weights, number = given["self"], given["num_samples"]
    best = weights.topk(min(number, weights.shape[-1]), dim=-1).indices
    return best if best.shape[-1] == number else best[..., :1].expand(*best.shape[:-1], number).contiguous()


def _in_order(func: Any, args: Any, kwargs: Any, given: dict[str, Any]) -> Any:
    made = func(*args, **kwargs)
    return made.copy_(torch.arange(given["n"], device=made.device, dtype=made.dtype))


def _normal(given: dict[str, Any]) -> float:
    # Not the mean itself: what is divided by its own norm would be no number.
    mean, spread = given.get("mean", 0.0), given.get("std", 1.0)  # randn has neither
    plain = not isinstance(mean, Tensor) and not isinstance(spread, Tensor)
    return float(mean) + 0.5 * float(spread) if plain else 0.5


_half = _filled(lambda _: 0.5)
_noise = _filled(_normal)
_zero = _filled(lambda given: float(given.get("low") or given.get("from") or 0))
_MEANS: dict[str, Callable[..., Any]] = {
    "rand": _half,
    "rand_like": _half,
    "uniform_": _filled(lambda given: (given["from"] + given["to"]) / 2),
    "randn": _noise,
    "randn_like": _noise,
    "normal": _noise,
    "normal_": _noise,
    "log_normal_": _filled(lambda given: math.exp(given["mean"])),
    "exponential_": _filled(lambda given: 1 / given["lambd"]),
    "cauchy_": _half,
    "geometric_": _filled(lambda given: 1 / given["p"]),
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli,
    "poisson": _itself,
    "_standard_gamma": _itself,
    "native_dropout": _dropout,
    "multinomial": _likeliest,
    "randperm": _in_order,
    "randint": _zero,
    "randint_like": _zero,
    "random_": _zero,
}
