import argparse

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="gpt2")
parser.add_argument("--accum", type=int, default=16)
cli = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(cli.model)
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(cli.model)
raw = load_dataset("wikitext", "wikitext-2-raw-v1")
tokenized = raw.map(lambda b: tokenizer(b["text"], truncation=True, max_length=512), batched=True)

args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=cli.accum,
    max_grad_norm=1.0,
    learning_rate=5e-5,
    lr_scheduler_type="cosine",
    warmup_ratio=0.03,
    bf16=True,
    logging_steps=10,
)
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = Trainer(model=model, args=args, train_dataset=tokenized["train"], data_collator=collator)
trainer.train()
