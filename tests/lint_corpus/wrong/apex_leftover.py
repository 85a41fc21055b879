from apex import amp
import torch
model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for epoch in range(args.epochs):
    tr_loss = 0.0
    for step, batch in enumerate(train_dataloader):
        batch = tuple(t.to(args.device) for t in batch)
        outputs = model(*batch)
        loss = outputs[0]
        if args.gradient_accumulation_steps > 1:
            loss = loss / args.gradient_accumulation_steps
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        tr_loss += loss.item()
        if (step + 1) % args.gradient_accumulation_steps == 0:  # expect: BB103
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            model.zero_grad()
