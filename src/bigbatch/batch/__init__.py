"""Big batches: cut, sorted, packed, moved, and their results joined."""
