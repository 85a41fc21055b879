"""Trainings that can be run: those of the teaching pages, by name, and a user's own `Setup`."""
