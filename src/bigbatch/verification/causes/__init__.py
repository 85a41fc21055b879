"""Finds causes by experiment: one thing after another is turned off, to see whether the difference goes away."""
