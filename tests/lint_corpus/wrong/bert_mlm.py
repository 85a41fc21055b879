import torch
from torch.optim.lr_scheduler import OneCycleLR
from transformers import BertForMaskedLM, BertTokenizerFast, DataCollatorForLanguageModeling

from lines import line_dataset

tok = BertTokenizerFast.from_pretrained("bert-base-uncased")
collator = DataCollatorForLanguageModeling(tok, mlm_probability=0.15)  # labels are -100 where nothing is masked
loader = torch.utils.data.DataLoader(line_dataset(tok), batch_size=8, shuffle=True, collate_fn=collator)
model = BertForMaskedLM.from_pretrained("bert-base-uncased").cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
grad_accum_steps = 4
n_updates = -(-len(loader) // grad_accum_steps)
scheduler = OneCycleLR(optimizer, max_lr=5e-5, total_steps=n_updates)

model.train()
for step, batch in enumerate(loader, start=1):
    batch = {k: v.cuda() for k, v in batch.items()}
    loss = model(**batch).loss
    loss = loss / grad_accum_steps  # expect: BB203
    loss.backward()
    if step % grad_accum_steps == 0 or step == len(loader):  # expect: BB104
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
