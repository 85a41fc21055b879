"""Answers that the help desk pastes into tickets.

A ticket often shows something like this, where the clearing undoes the adding up:

    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        total_loss += loss
        if i % accumulation_steps == 0:
            optimizer.step()

and the answer is `ANSWERS["zeroing"]`.
"""

import torch

ANSWERS = {
    "zeroing": "Call zero_grad() once per window, next to step(), not for every micro-batch.",
    "example": """
loss = criterion(model(x), y) / accumulation_steps
loss.backward()
if i % accumulation_steps == 0:  # wrong: the first window holds one micro-batch
    optimizer.step()
""",
}


def answer(topic: str) -> str:
    # optimizer.step() is never called here; the version helps the reader
    return f"{ANSWERS[topic]}\n(torch {torch.__version__})"
