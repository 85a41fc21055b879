"""Where the tensors of a model lie: a captured graph reads them by address, and sees no other take their place.

Many models make a table when they need it, such as the angles of rotary embeddings, and a longer one for a longer
batch. It is a buffer or a plain attribute, so both are looked at.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bigbatch.micro_steps.cuda_graph import NotCapturable

_NO_TABLES = frozenset(vars(nn.Module())) - {"_buffers"}  # what torch itself keeps in every module
_FEW = 64  # entries of a list or dict that may be tables; one with more is a vocabulary or the like


def state_of(models: Sequence[nn.Module], parameters: Sequence[Tensor]) -> tuple[object, ...]:
    """Return the modes of all modules, and where their tensors and these parameters lie, to be compared."""
    modules = _modules(models)
    own = [p for module in modules for p in module._parameters.values() if p is not None]  # noqa: SLF001 - one walk
    tensors = (*parameters, *own, *(found.tensor for found in _tables(modules)))
    return tuple([module.training for module in modules]), tuple([_place(tensor) for tensor in tensors])


@contextmanager
def keeping_tables(models: Sequence[nn.Module]) -> Iterator[None]:
    """Refuse a capture that puts other tensors in the place of those that modules keep: replays begin with the old.

    Where a capture fails, all modules have what they had before: what it has made was never computed.
    """
    modules = _modules(models)
    before, saved = _tables(modules), [_Attributes.of(module) for module in modules]
    try:
        yield
        for old, new in zip_longest(before, _tables(modules)):
            if old is None or new is None or old.tensor is not new.tensor:
                found = new or old
                raise NotCapturable(
                    f"its forward replaces a buffer or an attribute, {type(found.module).__name__}.{found.name}; write "
                    "into it instead, as with buffer.copy_()"
                )
    except BaseException:
        for attributes in saved:
            attributes.restore()
        raise


class _Table(NamedTuple):
    """A tensor that a module keeps beside its parameters."""

    module: nn.Module
    name: str
    tensor: Tensor


class _Attributes(NamedTuple):
    """What a module has in its attributes, and in the lists and dicts among them."""

    module: nn.Module
    kept: dict[str, Any]
    contents: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> "_Attributes":
        kept = dict(vars(module))
        return cls(module, kept, {name: copy(each) for name, each in kept.items() if _holds_few(name, each)})

    def restore(self) -> None:
        now = vars(self.module)
        for name in now.keys() - self.kept.keys():
            del now[name]
        now.update(self.kept)
        for name, content in self.contents.items():
            if isinstance(content, dict):
                self.kept[name].clear()
                self.kept[name].update(content)
            elif isinstance(content, list):
                self.kept[name][:] = content


def _modules(models: Sequence[nn.Module]) -> list[nn.Module]:
    return [module for model in models for module in model.modules()]


def _tables(modules: Sequence[nn.Module]) -> list[_Table]:
    found = []
    for module in modules:
        for name, kept in vars(module).items():
            if isinstance(kept, Tensor):
                found.append(_Table(module, name, kept))
            elif _holds_few(name, kept):
                inside = kept.items() if isinstance(kept, dict) else enumerate(kept)
                found += [_Table(module, str(key), each) for key, each in inside if isinstance(each, Tensor)]
    # What has a graph is an activation that was put aside: the next forward cannot go on from it.
    return [table for table in found if table.tensor.grad_fn is None]


def _holds_few(name: str, kept: object) -> bool:
    return name not in _NO_TABLES and isinstance(kept, dict | list | tuple) and len(kept) <= _FEW


def _place(tensor: Tensor) -> object:
    if tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride()
