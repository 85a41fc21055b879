"""Tests of BigStep."""
