"""What the library does not do yet, by row and entrance, with the reason: strict xfails."""

_ROWS = [
    (("big_step",), "terms of single pictures, divided by their number", "smp-lovasz-per-image"),
    (("accumulator",), "data that a difference spreads may be other samples'", "soft-dtw"),
]
OPEN = {
    f"{name}/{entrance}": reason
    for entrances, reason, names in _ROWS
    for name in names.split()
    for entrance in entrances
}
