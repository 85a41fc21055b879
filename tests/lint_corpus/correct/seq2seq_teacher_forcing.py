import random

import torch
from torch import nn

SOS, EOS = 0, 1
teacher_forcing_ratio = 0.5


def train_pair(src, tgt, encoder, decoder, enc_opt, dec_opt, criterion):
    enc_opt.zero_grad()
    dec_opt.zero_grad()
    target_length = tgt.size(0)
    loss = 0

    memory, hidden = encoder(src)
    token = torch.tensor([[SOS]])
    forced = random.random() < teacher_forcing_ratio
    for di in range(target_length):
        out, hidden = decoder(token, hidden, memory)
        loss += criterion(out, tgt[di])
        if forced:
            token = tgt[di]
        else:
            token = out.argmax(-1).detach()
            if token.item() == EOS:
                break

    loss.backward()
    enc_opt.step()
    dec_opt.step()
    return loss.item() / target_length


def train_iters(encoder, decoder, pairs, n_iters, print_every=1000, lr=0.01):
    enc_opt = torch.optim.SGD(encoder.parameters(), lr=lr)
    dec_opt = torch.optim.SGD(decoder.parameters(), lr=lr)
    criterion = nn.NLLLoss()
    print_loss_total = 0
    for it in range(1, n_iters + 1):
        src, tgt = random.choice(pairs)
        print_loss_total += train_pair(src, tgt, encoder, decoder, enc_opt, dec_opt, criterion)
        if it % print_every == 0:
            print(it, print_loss_total / print_every)
            print_loss_total = 0
