import torch
from torch.utils.data import DataLoader

from ctc import SpeechTransformer, Librispeech, ctc_loss


def forever(loader):
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main(args):
    model = SpeechTransformer().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.peak_lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 10_000))
    loader = DataLoader(Librispeech(), batch_size=12, sampler=args.sampler)
    updates = 0
    for i, (audio, text) in enumerate(forever(loader)):
        loss = ctc_loss(model(audio.cuda()), text) / args.accum
        loss.backward()
        if not (i + 1) % args.accum:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            updates += 1
            if updates == args.max_updates:
                break
