import torch
from bigbatch import Accumulator, counted

from dialogue import Dialogue, token_losses


def fine_tune(model, chats: Dialogue, budget_seconds: float, clock) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    acc = Accumulator(model, optimizer, steps=8)
    for chat in chats:
        mask = chat.labels != -100
        tokens = mask.sum()
        loss = (token_losses(model, chat) * mask).sum() / tokens
        acc.backward(counted(loss, tokens))
        if clock() > budget_seconds:
            break
    acc.flush()  # the last window may be short; it is weighed right all the same
