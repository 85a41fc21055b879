"""`python -m benchmarks`: both tables; `python -m benchmarks exactness --json`: one of them, with its own options."""

import sys

TABLES = ("exactness", "overhead")


def main() -> int:
    """Hand over to the tables that were asked for."""
    asked = [name for name in TABLES if name in sys.argv[1:]] or list(TABLES)
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument not in TABLES]
    if len(asked) > 1 and sys.argv[1:]:
        print(f"which table are these options for: {' or '.join(TABLES)}?", file=sys.stderr)
        return 2
    worst = 0
    for name in asked:
        # One at a time: each loads only what it compares.
        if name == "exactness":
            from benchmarks import exactness as table
        else:
            from benchmarks import overhead as table  # type: ignore[no-redef]
        worst = max(worst, table.main())
    return worst


if __name__ == "__main__":
    sys.exit(main())
