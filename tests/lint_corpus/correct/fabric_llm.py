import lightning as L
import torch

from lit import GPT, Config, TokenStream


def main(micro_batch=4, global_batch=128, max_steps=10_000, lr=3e-4, devices=4):
    fabric = L.Fabric(devices=devices, strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    with fabric.init_module():
        model = GPT(Config.from_name("pythia-160m"))
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=lr))
    gradient_accumulation_iters = global_batch // (micro_batch * devices)
    assert gradient_accumulation_iters > 0

    step_count, iter_num = 0, 0
    for tokens in TokenStream("openwebtext", micro_batch, endless=True):
        if step_count >= max_steps:
            break
        iter_num += 1
        is_accumulating = iter_num % gradient_accumulation_iters != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            fabric.backward(loss / gradient_accumulation_iters)
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            step_count += 1
            if step_count % 50 == 0:
                fabric.print(f"step {step_count} loss {loss.item():.4f}")
