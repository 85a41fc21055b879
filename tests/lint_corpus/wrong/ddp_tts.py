import contextlib

import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from tts import FastSpeech, endless_utterances, init


def main(accum=4, total=200_000):
    rank = init()
    net = DDP(FastSpeech().cuda(rank), device_ids=[rank])
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.98))
    utts = endless_utterances(rank, batch=8)
    for it in range(total):
        for k in range(accum):
            ctx = net.no_sync if k < accum - 1 else contextlib.nullcontext
            with ctx():
                text, mel = next(utts)
                loss = torch.nn.functional.l1_loss(net(text), mel)
                loss.backward()  # expect: BB201
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad()


if __name__ == "__main__":
    main()
