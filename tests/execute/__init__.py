"""Tests of how micro-batches are run: launched, replayed, restored."""
