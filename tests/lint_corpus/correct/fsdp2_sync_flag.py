import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from llama import Llama, LlamaConfig, packed_batches


def main(accum: int = 8, updates: int = 5000):
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model = Llama(LlamaConfig.small()).cuda()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = packed_batches(length=2048)

    for update in range(updates):
        for micro in range(accum):
            is_last = micro == accum - 1
            model.set_requires_gradient_sync(is_last)
            model.set_is_last_backward(is_last)
            inputs, targets = next(data)
            logits = model(inputs)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            (loss / accum).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        if update % 100 == 0 and dist.get_rank() == 0:
            print(update, loss.item())


if __name__ == "__main__":
    main()
