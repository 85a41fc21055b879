"""The names a user may rely on: a new one is a decision, a lost one a breakage."""

from importlib.util import find_spec

import bigbatch

PUBLIC = [
    "Accumulator",
    "BigStep",
    "GradientNoise",
    "Options",
    "Setup",
    "Update",
    "across",
    "counted",
    "errors",
    "plan",
    "scale_lr",
    "verify",
    "warmup",
]


def test_the_public_names_are_these() -> None:
    """`__all__` is the surface, and every name of it is there."""
    assert sorted(bigbatch.__all__) == PUBLIC
    assert all(hasattr(bigbatch, name) for name in PUBLIC)
    assert set(PUBLIC) <= set(dir(bigbatch))


def test_no_module_takes_the_place_of_a_public_name() -> None:
    """Importing `bigbatch.plan.x` would put a module where `bigbatch.plan()` is; two public names are modules."""
    modules = {name for name in PUBLIC if find_spec(f"bigbatch.{name}") is not None}
    assert modules == {"across", "errors"}
