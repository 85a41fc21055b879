"""Where the tensors of a model lie: a captured graph reads them by address, and sees no other take their place.

Many models make a table when they need it, such as the angles of rotary embeddings, and a longer one for a longer
batch. It is a buffer or a plain attribute, so both are looked at.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bigbatch.execute.graph_record import NotCapturable

_TORCHS_OWN = frozenset(vars(nn.Module())) - {"_buffers"}  # what every module has, and no table is in
_CONTAINERS = (dict, list, tuple)
_FEW = 64  # entries of one that may be tables; where there are more, it is a vocabulary or the like


def state_of(models: Sequence[nn.Module], parameters: Sequence[Tensor]) -> object:
    """Return the modes of all modules, and where their tensors and these parameters lie, to be compared."""
    modules = _modules(models)
    own = [p for module in modules for p in module._parameters.values() if p is not None]  # noqa: SLF001 - one walk
    return (
        [module.training for module in modules],
        [p.data_ptr() for p in (*parameters, *own)],
        [_place(table.tensor) for table in _tables(modules)],
    )


@contextmanager
def keeping_tables(models: Sequence[nn.Module]) -> Iterator[None]:
    """Refuse a capture that puts other tensors in the place of those that modules keep: replays begin with the old.

    Where a capture fails, modules have what they had before: what it has made was never computed.
    """
    modules = _modules(models)
    before, attributes = _tables(modules), [_Attributes.of(module) for module in modules]
    try:
        yield
        _refuse_replaced(before, _tables(modules))
    except BaseException:
        for each in attributes:
            each.restore()
        raise


class _Table(NamedTuple):
    """A tensor that a module keeps beside its parameters."""

    module: nn.Module
    name: str
    tensor: Tensor


class _Attributes(NamedTuple):
    """What a module has in its attributes, and in the dicts and lists among them."""

    module: nn.Module
    kept: dict[str, Any]
    dicts: list[tuple[dict[Any, Any], dict[Any, Any]]]
    lists: list[tuple[list[Any], list[Any]]]

    @classmethod
    def of(cls, module: nn.Module) -> "_Attributes":
        kept = dict(vars(module))
        inner = [each for name, each in kept.items() if name not in _TORCHS_OWN]
        dicts = [(each, dict(each)) for each in inner if isinstance(each, dict)]
        return cls(module, kept, dicts, [(each, list(each)) for each in inner if isinstance(each, list)])

    def restore(self) -> None:
        now = vars(self.module)
        for name in now.keys() - self.kept.keys():
            del now[name]
        now.update(self.kept)
        for each, content in self.dicts:
            each.clear()
            each.update(content)
        for entries, saved in self.lists:
            entries[:] = saved


def _refuse_replaced(before: list[_Table], after: list[_Table]) -> None:
    for old, new in zip_longest(before, after):
        if old is None or new is None or old.tensor is not new.tensor:
            found = new or old
            raise NotCapturable(
                f"its forward replaces a buffer or an attribute, {type(found.module).__name__}.{found.name}; write "
                "into it instead, as with buffer.copy_()"
            )


def _modules(models: Sequence[nn.Module]) -> list[nn.Module]:
    return [module for model in models for module in model.modules()]


def _tables(modules: Sequence[nn.Module]) -> list[_Table]:
    found = []
    for module in modules:
        for name, kept in vars(module).items():
            if name in _TORCHS_OWN:
                continue
            if isinstance(kept, Tensor):
                found.append(_Table(module, name, kept))
            elif isinstance(kept, _CONTAINERS) and 0 < len(kept) <= _FEW:
                inside = kept.items() if isinstance(kept, dict) else ((name, each) for each in kept)
                found += [_Table(module, str(key), each) for key, each in inside if isinstance(each, Tensor)]
    # What has a graph is an activation that was put aside: no forward goes on from it, its graph is spent.
    return [table for table in found if table.tensor.grad_fn is None]


def _place(tensor: Tensor) -> object:
    """Another tensor in the same place with the same shape is as good, since a graph reads what is there."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
