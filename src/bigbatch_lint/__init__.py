"""Finds the classic mistakes of gradient accumulation in training scripts and notebooks, without importing any of them.

    files ──source──▶ syntax tree ──interpreter──▶ trace ──windows──▶ windows of each training loop ──rules──▶ findings

The interpreter runs the skeleton of the training loop: counters, conditions and lengths are concrete integers, tensors
are opaque. The trace says which micro-batch entered which step with which weight; a rule is a predicate on it. What the
interpreter cannot follow, it leaves out: a false alarm costs more than a mistake that stays unseen.
"""
