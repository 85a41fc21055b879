"""The patch from a simple loop to `Accumulator`: what is simple enough, and what is written instead."""
