import random

import torch
from torch import nn

n_hidden = 128
learning_rate = 0.0005
criterion = nn.NLLLoss()


def train(rnn, input_line_tensor, target_line_tensor):
    target_line_tensor.unsqueeze_(-1)
    hidden = torch.zeros(1, n_hidden)
    rnn.zero_grad()
    loss = torch.zeros(1)
    # one name is one sample: the letters' losses are added and go back together
    for i in range(input_line_tensor.size(0)):
        output, hidden = rnn(input_line_tensor[i], hidden)
        loss += criterion(output, target_line_tensor[i])
    loss.backward()
    with torch.no_grad():
        for p in rnn.parameters():
            p.add_(p.grad, alpha=-learning_rate)
    return output, loss.item() / input_line_tensor.size(0)


def run(rnn, pairs, n_iters=100000, plot_every=500):
    all_losses, total_loss = [], 0
    for it in range(1, n_iters + 1):
        _, loss = train(rnn, *random.choice(pairs))
        total_loss += loss
        if it % plot_every == 0:
            all_losses.append(total_loss / plot_every)
            total_loss = 0
    return all_losses
