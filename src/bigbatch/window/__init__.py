"""One window, from the first backward to the step."""
