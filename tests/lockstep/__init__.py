"""Tests of micro-batches that run side by side."""
