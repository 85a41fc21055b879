import argparse

import torch
from transformers import BertForSequenceClassification, get_linear_schedule_with_warmup

from mrpc import mrpc_loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    args = parser.parse_args()
    train_dataloader = mrpc_loader(batch_size=8)
    model = BertForSequenceClassification.from_pretrained("bert-base-cased")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    t_total = len(train_dataloader) // args.gradient_accumulation_steps * args.num_train_epochs
    scheduler = get_linear_schedule_with_warmup(optimizer, int(0.1 * t_total), t_total)
    for _ in range(args.num_train_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader):
            loss = model(**batch).loss
            if args.gradient_accumulation_steps > 1:
                loss = loss / args.gradient_accumulation_steps
            loss.backward()
            scheduler.step()  # expect: BB304
            if (step + 1) % args.gradient_accumulation_steps == 0:  # expect: BB103
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                model.zero_grad()


if __name__ == "__main__":
    main()
