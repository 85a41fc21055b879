"""One training on one device and on several: all end with the same weights, to rounding."""
