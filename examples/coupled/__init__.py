"""Losses that couple the samples of a batch, one per file: exact in a `BigStep`, by `bigbatch.across`.

Each file has a `network()`, made-up `samples(number)`, a `loss_fn(model, batch)` and a `main()` that trains for a few
updates: `python -m examples.coupled.clip`. Called anywhere else than in a `BigStep`, a `loss_fn` is the plain loss of
the batch it gets.
"""
