"""Proves that an accumulated gradient is the big batch's, or finds out why it is not; `api` has the function."""
