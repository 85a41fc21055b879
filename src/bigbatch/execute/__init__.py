"""One micro-step and how it is run: launched or replayed, again after a failure, checked at first."""
