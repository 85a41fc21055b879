"""`make faults`: exceptions at every place of a step, in one process and in several."""

from tests.faults import campaign, rank_faults, single_faults
from tests.faults.outcomes import Case

_NOTES = [
    (
        "Each case raises one exception once (at an operation of torch, at a place of a step, at the entry of a "
        "function of bigbatch), then goes on as the error or the documentation says: the batch again, or flush() or "
        "discard(). fine: parameters, optimizer state, buffers, gradients, random numbers, hooks, threads and patched "
        "functions are as promised, and the final weights are those of an undisturbed run, in float64 to 1e-12."
    ),
    (
        "wrong: other weights, without a word. lost: a batch, a window or an interrupt is gone. leaked: something was "
        "left changed. unclear: the error does not tell what happened, or accuses something else."
    ),
    (
        "ranks: one of two processes raises, is killed, stops for a while or runs out of memory. fine: both have made "
        "all updates, to the weights of an undisturbed run; or each has ended within 30 s, by the error itself, one of "
        "bigbatch or, in a forward of a sharded model, torch's, with the weights of the updates that it had made."
    ),
]


if __name__ == "__main__":
    parser = campaign.parser(__doc__ or "")
    parser.add_argument("--ranks", type=int, default=200, help="how many cases in several processes")
    parser.add_argument("--part", choices=["single", "ranks"], help="only these")
    parser.add_argument("--exact", nargs=4, metavar=("ENTRANCE", "MODE", "PLACE", "ERROR"), help="run this alone")
    given = parser.parse_args()
    if given.exact is not None:
        print(*single_faults.run([Case("single", 0, 0, *given.exact)]))  # noqa: T201 - a runner's result
        raise SystemExit
    single = campaign.Part("single", given.count or 10_000, single_faults.draw, single_faults.run)
    ranks = campaign.Part("ranks", given.ranks, rank_faults.draw, rank_faults.run)
    campaign.main("faults", given, [part for part in (single, ranks) if given.part in {None, part.name}], _NOTES)
