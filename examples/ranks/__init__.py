"""One training on one device and on several: all three end with the same weights, to rounding."""
