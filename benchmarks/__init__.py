"""What is claimed, measured: `python -m benchmarks.exactness` and `python -m benchmarks.overhead`."""
