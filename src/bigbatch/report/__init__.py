"""Results to look at: one HTML page each, with all that it needs inside."""
