"""Functions of torch that are ours for a while: in any order, from any thread, whatever interrupts."""

import itertools
import linecache
import sys
from contextlib import suppress
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from bigbatch.state import patch
from bigbatch.state.patch import Swap, swapped


def place() -> Any:
    """A module with a function."""
    return SimpleNamespace(name=lambda: "plain")


def swap(module: Any, letter: str) -> Swap:
    """Put a letter before what the function below says."""
    return Swap(module, "name", lambda plain: lambda: letter + plain())


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_several_upon_each_other_go_in_any_order(order: tuple[int, ...]) -> None:
    """Those that are left say what they say; the plain one comes back."""
    module = place()
    plain, swaps = module.name, [swap(module, letter) for letter in "abc"]
    for each in swaps:
        each.enter()
    left = ["a", "b", "c"]
    for number in order:
        assert module.name() == "".join(reversed(left)) + "plain"
        swaps[number].leave()
        left.remove("abc"[number])
    assert module.name is plain


def test_one_for_all_who_want_it() -> None:
    """The last one to leave puts back what was there when the first entered; what was made of that serves again."""
    module = place()
    own = swap(module, "a")
    module.name = theirs = lambda: "theirs"
    made: Any = None
    for failing in (False, True):
        with suppress(ZeroDivisionError), swapped(own), swapped(own):
            assert module.name() == "atheirs"
            assert own.plain is theirs
            made = module.name
            _ = 1 / (not failing)
        assert module.name is theirs
    with swapped(own):
        assert module.name is made


def test_an_interrupt_at_any_line_leaves_nothing_behind() -> None:
    """Entering, inside and leaving."""
    module = place()
    plain, swaps = module.name, (swap(module, "a"), swap(module, "b"))
    for line in range(400):
        at = [0]

        def trace(frame: FrameType, event: str, argument: Any, at: list[int] = at, line: int = line) -> Any:
            del argument
            if frame.f_code.co_filename != patch.__file__:
                return None
            # Python itself lets none come between the end of a `with` and the call of its exit.
            if event == "line" and not linecache.getline(patch.__file__, frame.f_lineno).lstrip().startswith("with "):
                at[0] += 1
                if at[0] == line + 1:
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        with suppress(KeyboardInterrupt):
            sys.settrace(trace)
            try:
                with swapped(*swaps):
                    assert module.name() == "baplain"
            finally:
                sys.settrace(before)
        assert module.name is plain, line
        if at[0] <= line:
            break
    assert 20 < line < 399
