"""What every test stands on: one torch thread, Hypothesis profiles, GPU tests that say why they skip."""

import gc
import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.support import messages

# A first backward or a cold cache takes longer than any deadline worth setting.
hypothesis.settings.register_profile("default", deadline=None)
# A red run in CI must be red again when a person repeats it.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a night draw other chains of operations, and more of them, than every run does (tests/audit)."""
    parser.addoption("--chains", type=int, default=300, help="how many chains of operations are tried")
    parser.addoption("--approve", action="store_true", help="write the texts of errors to tests/messages")
    parser.addoption("--chain-seed", type=int, default=0, help="the seed that they are drawn from")


def pytest_configure(config: pytest.Config) -> None:
    """Let tests end in mid-window: that is what many of them are about, and test_forgotten.py looks at the warning."""
    messages.writing = config.getoption("--approve")
    config.addinivalue_line("filterwarnings", "ignore:a window was left open:UserWarning")
    config.addinivalue_line("filterwarnings", "ignore:this loss draws random numbers:UserWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `cuda` where there is no GPU, and say so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and torch.cuda.is_available() is False"))


@pytest.fixture(autouse=True, scope="module")
def _memory_of_one_module() -> Iterator[None]:
    """Free what a module's tests left on the GPU: captured graphs in reference cycles hold their memory pools.

    Each retry after out of memory collects garbage, and need not look through all that imports have made.
    """
    gc.freeze()
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
