from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

dataset = load_dataset("trl-lib/Capybara", split="train")
config = SFTConfig(
    output_dir="capybara",
    per_device_train_batch_size=1,
    gradient_accumulation_steps=16,
    gradient_checkpointing=True,
    learning_rate=2e-4,
    bf16=True,
    max_length=2048,
)
trainer = SFTTrainer(
    model="Qwen/Qwen2.5-0.5B", args=config, train_dataset=dataset, peft_config=LoraConfig(r=16, lora_alpha=32)
)
trainer.train()
trainer.save_model()
