from apex import amp
import torch
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
steps_per_epoch = len(train_dataloader) // args.gradient_accumulation_steps
model.zero_grad()
for _ in range(int(args.num_train_epochs)):
    for step, batch in enumerate(train_dataloader):
        if step >= steps_per_epoch * args.gradient_accumulation_steps:
            break
        loss = model(**batch)[0]
        if args.gradient_accumulation_steps > 1:
            loss = loss / args.gradient_accumulation_steps
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        if (step + 1) % args.gradient_accumulation_steps == 0:
            if args.fp16:
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_grad_norm)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            model.zero_grad()
