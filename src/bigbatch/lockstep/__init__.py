"""Micro-batches of one window that run side by side and meet, where a sample's loss depends on the other samples."""
