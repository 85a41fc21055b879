"""What a loss must pass before its gradient is added: no BatchNorm by the micro-batch, terms that can be read."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any, Literal

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import Node
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.optim import Optimizer

from bigbatch.distributed.fsdp_internals import leaving_alone, parameters_of, sharded, tensors_of, whole_weights
from bigbatch.errors import ConfigurationError, LossError, WindowDisturbed
from bigbatch.loss import refusals
from bigbatch.loss.count import Term
from bigbatch.loss.graph import edges, is_leaf, operation, saved, saved_tensor, shape, variable
from bigbatch.loss.origin import FrozenWeights, Surroundings
from bigbatch.loss.readings import Reader
from bigbatch.state.scope import NeedsLockStep, asked_anywhere, times_asked
from bigbatch.window.awake_norms import batch_norms, is_awake, refuse_awake, refuse_compiled, unheld
from bigbatch.window.gradients import all_parameters, sparing
from bigbatch.window.hints import Hints

_present: "weakref.WeakSet[Admission]" = weakref.WeakSet()  # of everyone that trains a model in this process


class Admission:
    """Looks at the losses of some models before they are used."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        batch_norm: Literal["exact", "refuse", "micro"],
        accepting: str,
        *,
        divisors: bool = False,
        is_one: Callable[[], bool] = lambda: False,
    ) -> None:
        """Know the models' parameters and frozen weights; `accepting` is what to type to accept micro-batch norms.

        `divisors`: a tensor that divides a sum is its count, as in `(loss * mask).sum() / mask.sum()`; to be checked.
        `is_one`: whether the micro-batch at hand is known to be one sample.
        """
        self.exact = batch_norm == "exact"
        self.side_by_side = 0  # how many micro-batches run in lock-step, where they do
        self.models, self._optimizers = tuple(models), optimizers
        self._refuses, self._accepting = batch_norm == "refuse", accepting
        self.batch_norms: list[tuple[str, BatchNorm]] = []
        parts = sharded(models)
        surroundings = Surroundings(
            time_first=any(getattr(each, "batch_first", True) is False for model in models for each in model.modules()),
            own=frozenset(id(p) for p in all_parameters(optimizers)),
            is_weight=FrozenWeights(self.models, partial(whole_weights, parts)),
            micro_batch_norm=not self._refuses,  # where it is met exactly, it is the model's edge as well
            divisors=divisors,
            is_one=is_one,
        )
        self.reader, self.hints, self._own = Reader(surroundings), Hints(), surroundings.own
        self._scanned: set[int] = set()  # kinds of graphs that were looked through as a whole
        self.may_wake = False  # a BatchNorm of a model that we do not know rests: only its graph shows if it still does
        # Gradients go to our optimizers' parameters alone. The graph of a sharded model ends at parameters of its own.
        self.only_own, self._is_sharded = not parts, bool(parts)
        self._walked: tuple[list[Any], list[Any], list[Tensor]] | None = None  # in the window at hand
        self.others: dict[int, weakref.ref[Tensor]] = {}  # parameters that losses run through, and that are not ours
        self._versions: dict[int, int] = {}  # of those, at the first micro-batch of the window
        _present.add(self)

    @property
    def is_wary(self) -> bool:
        """Whether each loss is to be looked at beyond its terms, and each backward to be watched."""
        return self.may_wake or bool(self.others) or not self.only_own

    def open(self) -> None:
        """Look up the BatchNorm layers, at the start of a window."""
        self._walked = None
        self._versions.clear()
        if self._refuses or self.exact:
            self.batch_norms = batch_norms(self.models)

    def warn_of_hooks(self, *, several: bool) -> None:
        """Warn of gradient hooks, once, where several gradients are added up."""
        if several and not self.hints.saw_hooks:  # asked here: a call for nothing is felt by a small model
            self.hints.check_gradient_hooks(self.models, all_parameters(self._optimizers))

    def run_side_by_side(self, wanted: bool) -> None:  # noqa: FBT001 - a mode
        """Say how micro-batches run from now on; graphs are looked through again where that is new."""
        if wanted != bool(self.side_by_side):
            self.reader.forget()
            self._scanned.clear()
        self.side_by_side = int(wanted)

    def needs_lock_step(self) -> bool:
        """Whether a BatchNorm is in training mode, which should normalise by the big batch."""
        return self.exact and any(is_awake(module) for _, module in self.batch_norms)

    def sparing_others(self) -> AbstractContextManager[None]:
        """Leave all parameters alone that no optimizer of ours has, where a backward cannot choose."""
        return nullcontext() if self.only_own else self._sparing()

    @contextmanager
    def _sparing(self) -> Iterator[None]:
        if self._walked is None:
            # A loss may run through models that others train, as a generator's through its discriminator.
            every = {id(model): model for each in _present for model in each.models}.values()
            parts = sharded([*every])
            self._walked = parts, [*parameters_of(parts)], [p for model in every for p in model.parameters()]
        (parts, shards, parameters), ours = self._walked, all_parameters(self._optimizers)
        # The outermost of sharded modules has whole parameters until its backward, whose gradients may wait for more.
        own = {id(p) for p in ours}
        own |= {id(p) for each in shards if id(each.sharded_param) in own for p in tensors_of(each)}
        found = chain(*map(tensors_of, shards), parameters)
        others = {id(p): p for p in found if id(p) not in own and p.requires_grad}
        with leaving_alone(parts, ours), sparing(others.values()):
            yield

    def admit(self, loss: Tensor, scaler: GradScaler | None, given: Term | None = None) -> list[Term]:
        """Return the terms of a loss that may be added, or refuse it; `given` where the user has said what it is."""
        if scaler is not None:
            refuse_scaled(loss, scaler)
        if self.batch_norms:  # asked here, and so below: a call for nothing is felt by a small model
            self.look()
        terms = self.reader.read(loss) if given is None else [given]
        self.reader.fresh |= given is not None  # it was not read
        if self.reader.fresh or self.may_wake:
            self._look_through(loss)
        return terms

    def look(self) -> None:
        """Refuse BatchNorm in training mode, before each micro-batch is used."""
        if self._refuses:
            refuse_awake(self.batch_norms, self._accepting)
        elif not self.side_by_side and self.needs_lock_step():
            raise NeedsLockStep("BatchNorm in training mode")

    def look_at_compiled(self) -> None:
        """Refuse BatchNorm in training mode inside of compiled code, before any is compiled."""
        if self.exact and self.batch_norms:
            refuse_compiled(self.models)

    def _look_through(self, loss: Tensor) -> None:
        """Look through a whole new graph for what the walk to the model's edge does not meet; some milliseconds."""
        kind = kind_of_graph(loss) if self.reader.fresh else 0
        if kind in self._scanned and not self.may_wake:
            return
        try:
            if not self._is_sharded and self.reader.fresh:
                self._refuse_sharded_since()
            found = Scan(loss)
            if found.reentrant_checkpoint:
                self.only_own = False  # it cannot run a backward with a chosen set of parameters
            self._look_at_leaves(found)
            self._look_at_norms(found)
        except BaseException:
            self.reader.forget()  # a graph that looks the same is to be looked through again
            raise
        self._scanned.add(kind)

    def _refuse_sharded_since(self) -> None:
        """What fully_shard puts in the place of parameters is in no optimizer that was made before."""
        trained = [each.sharded_param for each in parameters_of(sharded(self.models))]
        if any(p.requires_grad and id(p) not in self._own for p in trained):
            late = "fully_shard(model); optimizer = AdamW(model.parameters()); "
            raise ConfigurationError(
                "fully_shard was called on this model too late, and has put shards in the place of parameters that the "
                "optimizer holds: this loss reaches none of those.",
                fix=late + "Accumulator(model, optimizer, ...)",
                fix_in_step=late + "BigStep(model, optimizer, ...)",
            )

    def _look_at_leaves(self, found: "Scan") -> None:
        """Note parameters of others; the graph of a sharded model ends at tensors that are not the optimizer's."""
        if found.alone:
            raise refusals.alone()
        if not self._is_sharded:
            others = (p for key, p in found.leaves.items() if key not in self._own and isinstance(p, nn.Parameter))
            self.others.update((id(p), weakref.ref(p)) for p in others)
        elif found.leaves.keys() & self._own:
            raise LossError(
                "this loss uses parameters of the optimizer outside of the forward of a model that fully_shard has "
                "sharded: nothing adds up what ranks find for them there.",
                fix="such a term inside the model's forward, of parameters that are the model's; for a penalty, "
                "weight_decay=",
            )

    def _look_at_norms(self, found: "Scan") -> None:
        """Refuse BatchNorm in training mode that stands in a graph, and note whether others rest."""
        if found.batch_norm and self.exact and not self.side_by_side:
            raise NeedsLockStep("BatchNorm in training mode")
        if found.batch_norm and (self._refuses or (self.exact and self.side_by_side > 1)):
            raise unheld(self._accepting, given=self.exact)
        if (self._refuses or self.exact) and found.resting and not self.may_wake:
            own = {m.running_mean.data_ptr() for _, m in self.batch_norms if m.running_mean is not None}
            self.may_wake = not found.resting <= (own | {0} if own else own)

    def refuse_changed(self, loss: Tensor) -> None:
        """Refuse a loss that was computed with parameters of others which have changed since the window began."""
        used = {key: p._version for key, ref in self.others.items() if (p := ref()) is not None}  # noqa: SLF001
        changed = {key for key, version in used.items() if self._versions.setdefault(key, version) != version}
        if changed and (changed := changed & Scan(loss).leaves.keys()):  # the rest is of other losses
            order = "fake = generator(noise) once, then the generator's backward, then the discriminator's"
            raise WindowDisturbed(
                f"this loss runs through parameters that another optimizer trains, which has changed {len(changed)} of "
                "them since the window's first micro-batch, as a discriminator's that steps before its generator.",
                fix=f"{order}; or a BigStep each. accumulator.discard() drops this window",
                fix_in_step=order,
            )


class Questions:
    """Whether losses have asked for other micro-batches, with `across`, where an accumulator has none to ask."""

    def __init__(self) -> None:
        self.anywhere = asked_anywhere[0]  # when it was last looked at: a number to be had quickly
        self._in_training = times_asked(in_training=True)  # when a loss last passed
        self._refused: weakref.ref[Tensor] | None = None  # the loss that was refused for it

    def check(self, loss: Tensor, since: int | None) -> None:
        """Refuse a loss that may have asked, perhaps for a value without a place in its graph.

        In `over` it may `since` its batch was given out, else since the last backward, with gradients enabled.
        """
        if since is not None:
            if times_asked() != since:
                raise refusals.alone()
        elif times_asked(in_training=True) != self._in_training or (self._refused and self._refused() is loss):
            self._in_training, self.anywhere = times_asked(in_training=True), -1  # look again
            self._refused = weakref.ref(loss)
            raise refusals.alone()
        self.anywhere, self._refused = asked_anywhere[0], None


_NODES_LOOKED_AT, _TERMS_LOOKED_AT = 96, 64
_BETWEEN_TERMS = frozenset("Add Sub Rsub Mul Div Neg ToCopy View Squeeze Sum Mean Stack".split())
_BATCH_NORMS = frozenset("NativeBatchNorm CudnnBatchNorm MiopenBatchNorm SyncBatchNormFunction".split())


class Scan:
    """What a whole graph holds."""

    def __init__(self, value: Tensor) -> None:
        self.reentrant_checkpoint = False
        self.alone = False  # it asked for other micro-batches where there were none
        self.batch_norm = False  # in training mode
        self.resting = set[int]()  # where running means of others lie; 0: one cannot tell
        self.leaves: dict[int, Tensor] = {}  # the tensors that its gradient goes to, by their ids
        for node in _nodes(value):
            name = operation(node)
            self.reentrant_checkpoint |= name == "CheckpointFunction"
            self.alone |= name == "_Alone"
            if is_leaf(node):
                self.leaves[id(variable(node))] = variable(node)
            elif name in _BATCH_NORMS and not saved(node, "training"):
                mean = saved_tensor(node, "running_mean")
                self.resting.add(0 if mean is None else mean.data_ptr())
            elif name in _BATCH_NORMS:  # instance norm is a batch norm of one batch, (1, samples x channels, ...)
                self.batch_norm |= shape(node)[0] > 1


def kind_of_graph(value: Tensor) -> int:
    """Tell graphs of different operations apart, whatever their sizes, by the part next to the loss."""
    return hash(tuple(map(operation, islice(_nodes(value), _NODES_LOOKED_AT))))


def refuse_scaled(loss: Tensor, scaler: GradScaler) -> None:
    """Refuse a loss that has the scaler's own tensor among its factors, or those of its terms."""
    scale: Any = getattr(scaler, "_scale", None)
    for node in islice(_nodes(loss, _BETWEEN_TERMS), _TERMS_LOOKED_AT) if scale is not None else ():
        factors = (saved_tensor(node, "other"), saved_tensor(node, "self")) if operation(node) == "Mul" else ()
        if any(factor is not None and factor.data_ptr() == scale.data_ptr() for factor in factors):
            raise LossError(
                "this loss has already been through scaler.scale(): it would be scaled twice.",
                fix="accumulator.backward(loss)",
                fix_in_step="return loss",
            )


def _nodes(value: Tensor, through: frozenset[str] | None = None) -> Iterator[Node]:
    """Yield the nodes of a graph, those next to its end first, perhaps only where it goes `through` some operations."""
    every, seen = [value.grad_fn], set[Node]()
    for node in every:  # it grows
        if node is not None and node not in seen and (through is None or operation(node) in through):
            seen.add(node)
            yield node
            every.extend(below for below, _ in edges(node))
