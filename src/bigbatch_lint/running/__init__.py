"""The interpreter: runs a script's skeleton and records what happens."""
