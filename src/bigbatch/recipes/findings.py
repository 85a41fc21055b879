"""What a comparison shows, in a few sentences made of its own numbers."""

from bigbatch.recipes.results import Comparison


def findings(comparison: Comparison) -> tuple[str, ...]:
    """What the textbook loop lost, what the old rate costs, what clipping did, and what was claimed and measured."""
    clipping = () if comparison.clip_norm is None else (_clipping(comparison, comparison.clip_norm),)
    return _lost(comparison), _slower(comparison), *clipping, _claimed(comparison)


def relative(distance: float) -> str:
    """A relative distance as a person writes it: 0.45, 2e-16."""
    return f"{distance:.0e}" if 0 < distance < 1e-3 else f"{distance:.2g}"  # noqa: PLR2004


def percent(share: float) -> str:
    """A share of one as a percentage."""
    return f"{100 * share:.1f} %"


def _lost(comparison: Comparison) -> str:
    """Samples, updates and weights that the textbook loop got wrong."""
    textbook, ours = comparison.textbook, comparison.accumulated
    micro, steps, samples = comparison.micro_batch, comparison.steps, comparison.samples
    left_out = (ours.samples_used - textbook.samples_used) // comparison.epochs
    last = samples % micro or micro
    if left_out:
        what = (
            f"The textbook loop left {left_out:,} of {samples:,} samples out of every epoch, since "
            f"{-(-samples // micro)} micro-batches are not a multiple of {steps}: "
            f"{textbook.updates:,} updates where the true batch makes {comparison.true.updates:,}"
        )
    elif last < micro:
        what = (
            f"The textbook loop used every sample, but its last micro-batch has {last} of them instead of {micro} "
            f"and weighs as much, so each of these counts {micro / last:g} times"
        )
    else:
        what = "The textbook loop lost nothing here, where all windows are full"
    return (
        f"{what}; its final weights are {relative(textbook.distance)} from the true batch's, "
        f"bigbatch's {relative(ours.distance)}."
    )


def _slower(comparison: Comparison) -> str:
    """Fewer updates of the same length get less far."""
    small, ours, rescaled = comparison.small, comparison.accumulated, comparison.rescaled
    slower = ours.loss.mean > small.loss.mean
    learned = "learns slower" if slower else "did not learn slower here"
    why = "since it makes" if slower else "though it makes"
    return (
        f"At the same rate of {ours.learning_rate:g}, accumulating {learned}, {why} {ours.updates:,} updates where "
        f"batch {small.micro_batch} makes {small.updates:,}: {percent(ours.accuracy_first.mean)} against "
        f"{percent(small.accuracy_first.mean)} after the first epoch and a loss of {ours.loss.mean:.3f} against "
        f"{small.loss.mean:.3f} after the last; at {rescaled.learning_rate:g}, which scale_lr gives for a batch "
        f"{comparison.steps} times the size, it has {percent(rescaled.accuracy_first.mean)} and "
        f"{rescaled.loss.mean:.3f}."
    )


def _clipping(comparison: Comparison, clip_norm: float) -> str:
    """How often a gradient was large enough to be clipped, in single batches and in accumulated ones."""
    small, ours = comparison.small, comparison.accumulated
    assert small.clipped is not None  # noqa: S101 - all arms are clipped, or none
    assert ours.clipped is not None  # noqa: S101
    norms = (
        f"the largest norm of a gradient was {small.clipped.largest_norm:.2g} in {small.name} and "
        f"{ours.clipped.largest_norm:.2g} accumulated"
    )
    if not any(arm.clipped.updates.mean for arm in comparison.arms if arm.clipped is not None):
        return f"Clipping at {clip_norm:g} changed nothing, in any arm: {norms}."
    return (
        f"Clipping at {clip_norm:g} changed {small.clipped.updates.mean:.4g} of {small.updates:,} updates in "
        f"{small.name} and {ours.clipped.updates.mean:.4g} of {ours.updates:,} accumulated ones"
        f"{', means over seeds' if comparison.seeds > 1 else ''}; {norms}."
    )


def _claimed(comparison: Comparison) -> str:
    """The figures of the teaching pages, where they have any, beside these."""
    small, textbook, true = comparison.small, comparison.textbook, comparison.true
    what = f"claim {comparison.claim}" if comparison.claim else "give no figures for this example"
    return (
        f"The teaching pages that this is from {what}; measured: {percent(small.accuracy_last.mean)} before and "
        f"{percent(textbook.accuracy_last.mean)} after, in {small.ms_per_epoch:.1f} ms an epoch before and "
        f"{textbook.ms_per_epoch:.1f} ms after, where the true batch of {comparison.batch} takes "
        f"{true.ms_per_epoch:.1f} ms."
    )
