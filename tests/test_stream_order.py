"""Activations that leave and come back, on streams that do nothing before somebody waits for them.

A device may run what is on another stream as late as it is allowed to. Here it always does: a copy that is read, or
whose memory is given out again, without a wait for it gives other numbers, or is caught.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from bigbatch import BigStep, Options
from bigbatch.lockstep import offload_fetch, offload_store, pinned_slabs, run
from bigbatch.lockstep.offload_fetch import Held, Homecoming, Out
from tests.support.reference import distance, sgd, trained, weights
from tests.test_offloading import ACTIVATIONS, Residual, cross_entropy, images


class _Stream:
    """Things to do, in order, when somebody waits for them."""

    def __init__(self, *_: object) -> None:
        self.todo: list[Callable[[], None]] = []
        self.done = 0

    def wait_event(self, event: "_Event") -> None:
        self.todo.append(event.happen)
        self.added()

    def wait_stream(self, other: "_Stream") -> None:
        self.todo.append(partial(other.run, len(other.todo)))
        self.added()

    def added(self) -> None:
        """Take one's time."""

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.todo[self.done - 1]()


class _Here(_Stream):
    """The stream of the computation, which has always done what it was given."""

    def added(self) -> None:
        self.run(len(self.todo))


class _Event:
    def __init__(self) -> None:
        self.happen: Callable[[], None] = _never

    def record(self, stream: _Stream) -> None:
        self.happen = partial(stream.run, len(stream.todo))


def _never() -> None:
    raise AssertionError("an event was waited for that nobody has recorded")


class _Copies(TorchFunctionMode):
    """Has copies made later."""

    def __init__(self, stream: _Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is not Tensor.copy_:
            return func(*args, **(kwargs or {}))
        to, of = args
        places = [(each.shape, each.stride(), each.storage_offset(), each.dtype, each.is_conj()) for each in args]
        memory = [StorageWeakRef(each.untyped_storage()) for each in args]
        self._stream.todo.append(partial(_copied, memory, places))
        assert kwargs == {"non_blocking": True}
        del of
        return to


def _copied(memory: list[StorageWeakRef], places: list[Any]) -> None:
    assert not any(each.expired() for each in memory), "memory was given back before a copy of it was made"
    tensors = []
    for reference, (shape, stride, offset, dtype, conjugate) in zip(memory, places, strict=True):
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        assert storage.nbytes(), "memory was given back before a copy of it was made"
        plain = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
        tensors.append(plain.conj() if conjugate else plain)
    to, of = tensors
    to.copy_(of)


def test_what_leaves_again_is_fetched_again() -> None:
    """Ahead of its turn, as the first time: a shortcut waits at two norms of one block."""
    outs = [Out(torch.ones(4), 16, _Event()) for _ in range(2)]  # type: ignore[arg-type]
    for out in outs:
        out.copied.record(_Here())  # type: ignore[arg-type]
    homes = [torch.ones(4) for _ in outs]
    coming = Homecoming(torch.device("cpu"), _Here(), outs, 32)  # type: ignore[arg-type]
    coming.order = [0, 0, 1]
    coming.empty(0, Held(StorageWeakRef(homes[0].untyped_storage()), 0))
    coming.empty(1, Held(StorageWeakRef(homes[1].untyped_storage()), 1))
    coming.come_home(0)
    coming.empty(0, Held(StorageWeakRef(homes[0].untyped_storage()), 0))
    coming.fetch_ahead()
    assert coming.there.keys() == {0, 1}


class _Torch:
    """torch, with streams that take their time."""

    def __init__(self) -> None:
        here = _Here()
        self.cuda = SimpleNamespace(Stream=_Stream, Event=_Event, current_stream=lambda *_: here, stream=self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @contextmanager
    def _stream(self, stream: _Stream) -> Iterator[None]:
        with _Copies(stream):
            yield

    @staticmethod
    def empty(*sizes: Any, pin_memory: bool = False, **named: Any) -> Tensor:
        del pin_memory
        return _spoilt(torch.empty(*sizes, **named))

    @staticmethod
    def empty_strided(*given: Any, **named: Any) -> Tensor:
        return _spoilt(torch.empty_strided(*given, **named))


def _spoilt(tensor: Tensor) -> Tensor:
    """Have nothing of use in memory that nobody has written."""
    _spoil(tensor.untyped_storage())
    return tensor


def _spoil(storage: torch.UntypedStorage) -> None:
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)  # NaN, in every dtype


@pytest.fixture(autouse=True)
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offload on the host, in small pieces, as late as can be."""
    late = _Torch()
    for module in (offload_store, offload_fetch, pinned_slabs):
        monkeypatch.setattr(module, "torch", late)
    monkeypatch.setattr(offload_store, "_WORTH_MOVING", 64)
    monkeypatch.setattr(pinned_slabs, "_SLAB", 1 << 14)
    monkeypatch.setattr(offload_store, "_IN_FLIGHT", 2)
    monkeypatch.setattr(run.Together, "_activations", lambda _, number: "keep" if number == 1 else "offload")
    empty, room = Homecoming.empty, Homecoming._room_for

    def emptied(self: Homecoming, number: int, home: Held) -> None:
        storage = home.taken()
        if storage is not None:
            _spoil(storage)
        del storage
        empty(self, number, home)

    def room_for(self: Homecoming, number: int, out: Any) -> Tensor:
        return _spoilt(room(self, number, out))

    monkeypatch.setattr(Homecoming, "empty", emptied)
    monkeypatch.setattr(Homecoming, "_room_for", room_for)


@pytest.mark.parametrize("waiting", [0, 0.8, 5])
@pytest.mark.parametrize("name", ["relu in place", "silu in place", "gelu"])
def test_the_big_batch_however_late_copies_are_made(name: str, waiting: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of sizes that come again and of others; what is fetched ahead is there when it is used."""
    monkeypatch.setattr(run, "_WAITING", waiting)
    torch.manual_seed(0)
    model = Residual(ACTIVATIONS[name]).double()
    twin = copy.deepcopy(model)
    optimizer = sgd(trained(twin))
    step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=2, options=Options(check=False))
    for number, samples in enumerate([13, 13, 13, 8, 13, 8]):
        step(images(samples, number))
        optimizer.zero_grad()
        cross_entropy(twin, images(samples, number)).backward()
        optimizer.step()
        assert distance(weights(model), weights(twin)) <= 1e-12
        assert distance(list(model.buffers()), list(twin.buffers())) <= 1e-12


@pytest.mark.parametrize("waiting", [0, 0.8])
def test_windows_that_ask_in_another_order(waiting: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was fetched for nothing is there before its memory is given out again."""
    monkeypatch.setattr(run, "_WAITING", waiting)

    class Skipping(Residual):
        uses = True

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            side = self.more(x)
            y = self.body(x)
            found: Tensor = self.last(y + side if self.uses else y)
            return found

    torch.manual_seed(0)
    model = Skipping(nn.GELU).double()
    twin = copy.deepcopy(model)
    optimizer = sgd(trained(twin))
    step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=2, options=Options(check=False))
    for number in range(6):
        model.uses = twin.uses = number not in {2, 4}
        step(images(12, number))
        optimizer.zero_grad()
        cross_entropy(twin, images(12, number)).backward()
        optimizer.step()
        assert distance(weights(model), weights(twin)) <= 1e-12


def test_memory_that_is_copied_in_two_views(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not given up when all of it was copied, while a part of it still is."""
    monkeypatch.setattr(run, "_WAITING", 0)

    class Parted(Residual):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            y = self.more[0](x)
            side = x[:, :2].square().mean(1, keepdim=True)
            y = self.more[1](y)
            found: Tensor = self.last(self.body(y) + x + side)
            return found

    torch.manual_seed(0)
    model = Parted(nn.GELU).double()
    twin = copy.deepcopy(model)
    step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=1, options=Options(check=False))
    step(images(6, 0))
    cross_entropy(twin, images(6, 0)).backward()
    sgd(trained(twin)).step()
    assert distance(weights(model), weights(twin)) <= 1e-12


@pytest.mark.parametrize("waiting", [0, 0.8])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_window_after_one_that_failed(where: str, waiting: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was on its way is through before its memory serves again, and nobody is left with another's."""
    monkeypatch.setattr(run, "_WAITING", waiting)
    found: list[tuple[Tensor, Tensor]] = []

    class Failing(Residual):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first[0](x)
            found.append((hidden, hidden.detach().clone()))
            y: Tensor = self.last(self.more(self.body(self.first[1](hidden))))
            if self.fails and len(x) == 1:
                if where == "forward":
                    raise ValueError("mine")
                y.register_hook(_raise)
            return y

    torch.manual_seed(0)
    model = Failing(nn.ReLU).double()
    twin = copy.deepcopy(model)
    optimizer = sgd(trained(twin))
    step = BigStep(model, sgd(trained(model)), cross_entropy, micro_batch_size=2, options=Options(check=False))
    for number in range(6):
        del found[:]
        model.fails = number % 2 == 1
        if model.fails:
            with pytest.raises(ValueError, match="mine"):
                step(images(9, number))
            assert all(torch.equal(*each) for each in found)
            continue
        step(images(9, number))
        optimizer.zero_grad()
        cross_entropy(twin, images(9, number)).backward()
        optimizer.step()
        assert distance(weights(model), weights(twin)) <= 1e-12


def _raise(_: Tensor) -> None:
    raise ValueError("mine")
