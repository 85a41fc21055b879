"""What a window restores, records and runs in: random numbers, buffers, out-of-memory errors, patches, scope."""
