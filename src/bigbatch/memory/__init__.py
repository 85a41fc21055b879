"""How much memory there is, what a micro-step takes of it, and which size to take."""
