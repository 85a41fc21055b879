"""`python -m benchmarks`: the tables that any machine can make; `python -m benchmarks gpu --only 4x8`: one, by name."""

import sys

EVERYWHERE = ("exactness", "overhead")
TABLES = (*EVERYWHERE, "gpu")


def main() -> int:
    """Hand over to the tables that were asked for."""
    asked = [name for name in TABLES if name in sys.argv[1:]] or list(EVERYWHERE)
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument not in TABLES]
    if len(asked) > 1 and sys.argv[1:]:
        print(f"which table are these options for: {' or '.join(asked)}?", file=sys.stderr)
        return 2
    worst = 0
    for name in asked:
        # One at a time: each loads only what it compares.
        if name == "exactness":
            from benchmarks import exactness as table
        elif name == "overhead":
            from benchmarks import overhead as table  # type: ignore[no-redef]
        else:
            from benchmarks import gpu as table  # type: ignore[no-redef]
        worst = max(worst, table.main())
    return worst


if __name__ == "__main__":
    sys.exit(main())
