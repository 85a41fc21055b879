import torch
from torch import nn

from nmt import Seq2Seq, Vocab, pairs

vocab = Vocab.load("de-en.json")
PAD_IDX = vocab["<pad>"]
model = Seq2Seq(len(vocab)).cuda()
criterion = nn.CrossEntropyLoss(ignore_index=PAD_IDX)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98))
update_freq = 8
stream = pairs("train", batch_size=32, endless=True)

for num_updates in range(100_000):
    optimizer.zero_grad()
    for _ in range(update_freq):
        src, tgt = next(stream)
        logits = model(src.cuda(), tgt[:, :-1].cuda())
        loss = criterion(logits.flatten(0, 1), tgt[:, 1:].flatten().cuda())
        loss = loss / update_freq  # expect: BB203
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
