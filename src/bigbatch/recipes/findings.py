"""What a comparison shows, in a few sentences made of its own numbers."""

from bigbatch.recipes.arms import Comparison


def findings(comparison: Comparison) -> tuple[str, ...]:
    """Say what the textbook loop lost, what the old rate costs, what clipping did, what was claimed and measured."""
    clipping = (_clipping(comparison),) if comparison.clip_norm is not None else ()
    return _lost(comparison), _slower(comparison), *clipping, _claimed(comparison)


def relative(distance: float) -> str:
    """Write a relative distance: 0.45, 2e-16."""
    return f"{distance:.0e}" if 0 < distance < 1e-3 else f"{distance:.2g}"  # noqa: PLR2004


def _lost(comparison: Comparison) -> str:
    _, textbook, ours, true, _ = comparison.arms
    micro, samples = comparison.micro_batch, comparison.samples
    left_out = (ours.samples_used - textbook.samples_used) // comparison.epochs
    last = samples % micro or micro
    what = "The textbook loop lost nothing here, where all windows are full"
    if left_out:
        what = (
            f"The textbook loop left {left_out:,} of {samples:,} samples out of every epoch, since "
            f"{-(-samples // micro)} micro-batches are not a multiple of {comparison.steps}: "
            f"{textbook.updates:,} updates where the true batch makes {true.updates:,}"
        )
    elif last < micro:
        what = (
            f"The textbook loop used every sample, but its last micro-batch has {last} of them instead of {micro} "
            f"and weighs as much, so each of these counts {micro / last:g} times"
        )
    return (
        f"{what}; its final weights are {relative(textbook.distance)} from the true batch's, "
        f"bigbatch's {relative(ours.distance)}."
    )


def _slower(comparison: Comparison) -> str:
    small, _, ours, _, rescaled = comparison.arms
    slower = ours.loss.mean > small.loss.mean
    return (
        f"At the same rate of {ours.learning_rate:g}, accumulating "
        f"{'learns slower, since' if slower else 'did not learn slower here, though'} it makes {ours.updates:,} "
        f"updates where batch {small.micro_batch} makes {small.updates:,}: {ours.accuracy_first.mean:.1%} against "
        f"{small.accuracy_first.mean:.1%} after the first epoch and a loss of {ours.loss.mean:.3f} against "
        f"{small.loss.mean:.3f} after the last; at {rescaled.learning_rate:g}, which scale_lr gives for a batch "
        f"{comparison.steps} times the size, it has {rescaled.accuracy_first.mean:.1%} and {rescaled.loss.mean:.3f}."
    )


def _clipping(comparison: Comparison) -> str:
    small, ours = comparison.arms[0], comparison.arms[2]
    if small.clipped is None or ours.clipped is None:
        return ""
    norms = (
        f"the largest norm of a gradient was {small.clipped.largest_norm:.2g} in {small.name} and "
        f"{ours.clipped.largest_norm:.2g} accumulated"
    )
    if not any(arm.clipped.updates.mean for arm in comparison.arms if arm.clipped is not None):
        return f"Clipping at {comparison.clip_norm:g} changed nothing, in any arm: {norms}."
    return (
        f"Clipping at {comparison.clip_norm:g} changed {small.clipped.updates.mean:.4g} of {small.updates:,} updates "
        f"in {small.name} and {ours.clipped.updates.mean:.4g} of {ours.updates:,} accumulated ones"
        f"{', means over seeds' if comparison.seeds > 1 else ''}; {norms}."
    )


def _claimed(comparison: Comparison) -> str:
    small, textbook, _, true, _ = comparison.arms
    what = f"claim {comparison.claim}" if comparison.claim else "give no figures for this example"
    return (
        f"The teaching pages that this is from {what}; measured: {small.accuracy_last.mean:.1%} before and "
        f"{textbook.accuracy_last.mean:.1%} after, in {small.ms_per_epoch:.1f} ms an epoch before and "
        f"{textbook.ms_per_epoch:.1f} ms after, where the true batch of {comparison.batch} takes "
        f"{true.ms_per_epoch:.1f} ms."
    )
