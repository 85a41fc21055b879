import lightning as L
import torch

from audio_lm import AudioLM, codec_stream


def main(accum=8):
    fabric = L.Fabric(precision="bf16-mixed", devices=1)
    model = AudioLM()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    model, optimizer = fabric.setup(model, optimizer)
    stream = codec_stream(batch=2)
    for update in range(40_000):
        for micro in range(accum):
            loss = model(next(stream)) / accum
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)  # expect: BB301
        optimizer.step()
        optimizer.zero_grad()
        if update % 100 == 0:
            fabric.print(update, loss.item())


main()
