"""The proof that an accumulated gradient is the big batch's, and the cause of each difference, found by experiment.

From the question to the answer:

    verify.py         what was asked, on as many samples as fit
    proof.py          both runs beside each other, and the verdict
    settling.py       how a window can be run at all
    inquiry.py        turn one thing after another off, and see the difference go
    looking.py        who draws, who writes, who looks from one sample to another
    weighing.py       what is left: the loss's shape (perturbing.py), or a loop's weights (weights.py, mistakes.py,
                      counting.py)
    precision.py      sums in few digits; repeating.py: what is not the same twice; judging.py: what is rounding

and what they stand on:

    runs.py           the big batch, the window, each micro-batch; ways.py: the ways to accumulate
    subject.py        the model, lent to each run as it was given; samples.py: the batch
    loops.py          a loop that others wrote, watched; clipping.py: what it clips
    turning_off.py    what can be turned off; drawing.py: random numbers; apart.py: a module's micro-batches one by one
    gradients.py      gradients by name; places.py: some elements of each; attributes.py: numbers beside the buffers
    evidence.py       a cause in words; verification.py, table.py: the result
"""
