"""A window that several ranks close together: what one says of it, and what follows from what all said."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from bigbatch.distributed.fingerprint import rates_in_one, settings
from bigbatch.distributed.launcher import is_of_the_wire, naming_lost_ranks
from bigbatch.distributed.ranks import Ranks
from bigbatch.distributed.reached import Reached
from bigbatch.distributed.statement import Agreement, Statement, agreed
from bigbatch.errors import BatchError, ConfigurationError, LossError, WindowError
from bigbatch.loss.count import Count, TotalOfSum
from bigbatch.loss.terms import Term
from bigbatch.window.gradients import Gradients
from bigbatch.window.same_loss import shown, without_ones
from bigbatch.window.stepper import Stepper
from bigbatch.window.tally import Ledger

_TERMS = 16  # with totals that are counted in advance
_FEW = 4093  # numbers below it can be told apart by their squares' sum


def totals(ranks: Ranks, own: tuple[Count, ...], device: torch.device) -> tuple[Count, ...]:
    """Add up totals that were counted in advance; a rank without a micro-batch has none, and hears those of others."""
    if len(own) > _TERMS:
        msg = f"a loss over several ranks can have {_TERMS} terms with counts of their own; counts= gave {len(own)}"
        raise ConfigurationError(msg)
    rest = [0.0] * (_TERMS - len(own))
    sums = [isinstance(each, TotalOfSum) for each in own]
    counts: list[Count] = [0.0 if is_sum else each for is_sum, each in zip(sums, own, strict=True)]
    terms = float(len(own))
    said = [*counts, *rest, *map(float, sums), *rest, terms, terms * terms, float(bool(own))]
    *found, lengths, squares, there = ranks.added(said, device, "totals")
    number = round(lengths / there) if there else 0
    of_sums = found[_TERMS : _TERMS + number]
    if lengths * lengths != there * squares or any(flag not in {0.0, there} for flag in of_sums):
        msg = (
            "the ranks of this window have different losses: another number of terms over data, or a mean here and a "
            "sum there. One big batch has one loss; write every term on every rank, times 0 where it does not apply."
        )
        raise LossError(msg)
    return tuple(TotalOfSum(1.0) if flag else total for flag, total in zip(of_sums, found[:number], strict=True))


def about(ranks: Ranks, ledger: Ledger, terms: list[Term], device: torch.device) -> float:
    """Return what a window of all ranks counts, if each of its micro-batches is like the first."""
    own = next((term.count for term in terms if term.kind == "mean"), 0.0)
    (found,) = ranks.added([own * ledger.steps], device, "about")
    return max(found, 1.0)


def statement(
    ledger: Ledger,
    gradients: Gradients,
    ranks: Ranks,
    *,
    goes_on: bool,
    precise: bool,
    left_out: int,
    partial: int,
    stepper: Stepper,
) -> Statement:
    """Say what this rank's window came to."""
    unknown: Count = 1.0 - ledger.loss_known.double() if isinstance(ledger.loss_known, Tensor) else 0.0
    if not isinstance(ledger.loss_known, Tensor) and not ledger.loss_known:
        unknown = 1.0
    lost = ledger.in_ratio is not None and not bool(ledger.in_ratio)
    return Statement(
        total=ledger.total if ledger.kind == "mean" else 0.0,
        loss=ledger.loss_or_plain(),
        micro_batches=ledger.micro_batches,
        kind=ledger.kind,
        loss_unknown=unknown,
        missing=sum(p.grad is None for p in gradients.parameters),
        goes_on=goes_on,
        shares_once=ledger.shares_once and ledger.kind != "mean",
        ratio=ledger.ratio() if ledger.kind == "mean" and ledger.reference else None,
        several=lost,
        form=_form(ledger),
        precise=precise,
        left_out=left_out + ranks.left_by_ddp(gradients.parameters) if ranks.reduced and not ranks.sharded else 0,
        overlapped=ranks.reduced and not ranks.sharded and ledger.micro_batches > 0,
        sparse=sum(p.grad is not None and p.grad.is_sparse for p in gradients.parameters) if ranks.adds_up else 0,
        hooked=ranks.hooked,
        hooks=bool(stepper.hooks),
        nothings=ledger.nothings,
        partial=partial,
        windows=ranks.windows % _FEW,
        parameters=gradients.which(),
        weights=0.0 if ranks.windows or ranks.sharded else gradients.sum_of_weights(ranks.frozen()),
        settings={} if ranks.windows else settings(stepper, gradients.dtype),
        rates=rates_in_one(stepper.optimizers),
    )


def _form(ledger: Ledger) -> str:
    """Return what a loss is made of, in words that all ranks must have in common; nothing where they may differ."""
    if not ledger.names or "count=" in ledger.names:
        return ""
    names = "its terms" if ledger.totals is not None else ", ".join(ledger.names)  # counted in advance by place alone
    factors = [without_ones(each) for each in ledger.factors or []]
    return f"{names} times {' and '.join(map(shown, factors))}" if any(factors) else names


def begin(ranks: Ranks, device: torch.device, *, has_batches: bool) -> None:
    """Make sure, before DDP reduces by itself, that all ranks have batches, or none: it could not be told there."""
    (number,) = ranks.added([float(has_batches)], device, "beginning")
    if number not in {0.0, float(ranks.size)}:
        msg = (
            f"{ranks.size - number:g} of {ranks.size} ranks have no batch in this `over`, and with overlap=True all "
            "need as many windows.\n"
            "Take overlap=True out: ranks may then have any number of micro-batches, or none."
        )
        raise BatchError(msg)


LAST_LEFT_OUT = (
    "the last batch of `over` had no accumulator.backward(loss) on this rank, and with overlap=True DDP reduces in "
    "that backward: other ranks may be waiting for it inside, where nothing can be told them. Nothing was stepped.\n"
    "Take overlap=True out, or leave batches out before accumulator.over(loader)."
)


@contextmanager
def telling_of_failure(ranks: Ranks | None, device: torch.device) -> Iterator[None]:
    """Tell other ranks, who wait for this one's statement, of an error inside, if they have not heard from it."""
    if ranks is None:
        yield
        return
    ranks.spoken = ranks.elsewhere = False
    try:
        with naming_lost_ranks():
            yield
    except Exception as error:
        if not ranks.spoken and not ranks.elsewhere and not is_of_the_wire(error):
            with suppress(Exception):  # they may be gone; what happened here is what is raised
                ranks.fail(device)
        raise


def tell_of_several(ranks: Ranks | None, device: torch.device) -> None:
    """Tell them, where there are any, that counts must be known in advance."""
    if ranks is not None and not ranks.spoken:
        agreed(ranks, Statement(several=True), device)


def counted(agreement: Agreement, ledger: Ledger) -> bool:
    """Whether anything was counted, by any rank; a window without makes no update."""
    if agreement.kind == "mean":
        return agreement.total > 0
    return agreement.micro_batches > 0 and (not ledger.totals or any(bool(total > 0) for total in ledger.totals))


def count(agreement: Agreement, ledger: Ledger) -> Count | tuple[Count, ...]:
    """Return what the loss was averaged over, on a rank without a micro-batch, too."""
    if agreement.kind in {"mean", "sum"}:
        return agreement.total if agreement.kind == "mean" else 1.0
    return ledger.count


def loss(agreement: Agreement) -> float:
    """Return the loss of the batch that all ranks have made, or the average of the micro-batches'."""
    if not agreement.loss_known:
        return agreement.loss / max(agreement.micro_batches, 1)
    if agreement.kind != "mean":
        return agreement.loss
    return agreement.loss / agreement.total if agreement.total else math.nan


def fill(ranks: Ranks, gradients: Gradients, agreement: Agreement) -> None:
    """Give parameters that only other ranks have reached a gradient of zero, so that all send the same."""
    if not agreement.missing:
        return
    wanted = ranks.anywhere([p.grad is not None for p in gradients.parameters], gradients.device)
    gradients.fill(wanted)


def refuse_nonfinite(ranks: Ranks, gradients: Gradients) -> None:
    """Raise on all ranks where a micro-batch that counts nothing may have left 0 / 0 in the gradient."""
    finite = bool(torch.isfinite(gradients.norm())) if gradients.dense() else True
    if ranks.failed_anywhere(here=not finite, device=gradients.device):
        msg = (
            "the gradient is not finite, and a micro-batch of this window counts nothing, on this rank or another: "
            "where its loss divides by its count by hand, 0 / 0 stands in its gradient, which all ranks got in its "
            "backward. Nothing was stepped.\n"
            "Divide by one at least:  loss = (values * mask).sum() / mask.sum().clamp(min=1), with count=mask.sum()"
        )
        raise LossError(msg)


def refuse_other_parts(ranks: Ranks, reached: Reached, device: torch.device) -> None:
    """Raise on all ranks where backwards that were added up have reached other parts of a sharded model."""
    least, most = ranks.span(float(reached.digest), device, ranks.scattering())
    if ranks.failed_anywhere(here=least != most, device=device):
        msg = (
            "micro-batches of this window have reached other parameters on one rank than on another, or one rank has "
            "dropped a window that others go on with. fully_shard adds up what all have reached one after the other, "
            "and leaves a part of it with each: gradients of one parameter may be in another's. Nothing was stepped.\n"
            "Run the same parts of the model in every pass on all ranks (the output of a part that does not apply, "
            "times 0), and discard() on all of them; or wrap the model in DistributedDataParallel, where ranks may "
            "take different paths."
        )
        raise WindowError(msg)
