"""Reads training scripts and notebooks for the classic mistakes of gradient accumulation.

It never imports torch, and never imports or runs what it reads: `ast` sees the script as a text.

    files ──sources──▶ a syntax tree ──reading──▶ events ──loops──▶ facts of each training loop ──rules──▶ findings

What it cannot follow, it leaves alone: an alarm that is false costs more than a mistake that stays unseen.
"""
