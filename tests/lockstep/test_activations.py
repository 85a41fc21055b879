"""Where activations wait, by what the user says, what a model allows, and what there is room for."""

from typing import Any

import pytest
import torch

from bigbatch.errors import OutOfMemory, UnreadableLoss
from bigbatch.lockstep import activations
from bigbatch.lockstep.activations import Activations
from bigbatch.lockstep.model_state import CannotRecompute

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)  # asked for its name alone


@pytest.mark.parametrize(
    ("given", "device", "micro_batches", "inside", "mode"),
    [
        ("auto", CPU, 2, False, "recompute"),
        ("auto", CPU, 2, True, "keep"),
        ("auto", GPU, 2, True, "keep"),
        ("keep", GPU, 2, False, "keep"),
        ("recompute", GPU, 1, False, "keep"),
        ("recompute", GPU, 2, True, "recompute"),
        ("offload", GPU, 2, False, "offload"),
        ("offload", CPU, 2, False, "keep"),
    ],
)
def test_the_first_choice(given: Any, device: torch.device, micro_batches: int, inside: bool, mode: str) -> None:
    """A single micro-batch waits for nobody, and a host's memory is where it is."""
    assert Activations(given, device).mode(micro_batches, meets_inside=inside) == mode


@pytest.mark.parametrize("given", ["auto", "recompute"])
def test_what_turns_out_on_the_way(given: Any) -> None:
    """A model that cannot be recomputed is kept, once and for all; what does not fit is offloaded from a device."""
    for error in (CannotRecompute("no"), UnreadableLoss("no")):
        where = Activations(given, GPU)
        assert not where.fall_back(error, recomputed=False, out_of_memory=False)
        assert not where.fall_back(ValueError(), recomputed=True, out_of_memory=False)
        assert where.fall_back(error, recomputed=True, out_of_memory=False) == (given == "auto")
        assert where.mode(2, meets_inside=False) == ("keep" if given == "auto" else "recompute")
        assert not where.fall_back(error, recomputed=True, out_of_memory=False)
        assert where.fall_back(MemoryError(), recomputed=False, out_of_memory=True) == (given == "auto")
        assert where.mode(2, meets_inside=True) == ("offload" if given == "auto" else "recompute")
        assert not where.fall_back(MemoryError(), recomputed=False, out_of_memory=True)
    unseen, on_host = Activations("auto", GPU), Activations("auto", CPU)
    unseen.passed(recomputed_nothing=True)
    unseen.passed(recomputed_nothing=False)
    assert unseen.mode(2, meets_inside=False) == "keep"
    assert not on_host.fall_back(MemoryError(), recomputed=False, out_of_memory=True)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_room_is_looked_for_before_the_window(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shape of a sample is measured once; what a device cannot hold goes to the host, and is refused there."""
    asked: list[float] = []

    def room(where: Activations, size: float, samples: int, shape: str = "a", *, budget: int = 1000) -> str:
        def measure() -> float:
            asked.append(size)
            return size

        where.make_room(measure, samples, shape, meets_inside=True, budget=budget, pinned=100)
        return where.mode(2, meets_inside=True)

    monkeypatch.setattr(activations, "host_available", lambda: 1900)
    monkeypatch.setattr(activations, "resident", lambda: 100)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 200)
    where = Activations("auto", device)
    assert [room(where, 10, 70), room(where, 10, 70)] == ["keep", "keep"]
    assert where.of_a_sample == 10
    assert asked == [10]
    most = 100 if device == GPU else 45  # what is pinned counts as there; a host keeps to memory= as well
    if device == GPU:  # 0.9 times 800 on the device itself
        assert room(where, 20, 37, "b") == "offload"
        assert room(Activations("keep", device), 1000, 1000) == "keep"
    room(where, 20, most, "b")
    with pytest.raises(OutOfMemory, match="Nothing was changed") as caught:
        room(where, 20, most + 1, "b")
    assert ("within memory=" in str(caught.value)) == (device == CPU)
    Activations("recompute", device).make_room(lambda: 1e9, 9, "", meets_inside=False, budget=1, pinned=0)
    assert asked == [10, 20]
    for shape in range(20):  # of many shapes the largest is taken
        room(where, 1, 2, f"{shape}")
    assert len(asked) == 16
    assert where.of_a_sample == 20
