# ruff: noqa: E501, D103, I001 - a row of a table is a line
# fmt: off
"""Models of transformers with their own losses, and what peft makes of them: from configurations, tiny."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import across
from bigbatch.errors import BatchNormError, CoupledLoss, SeveralCounts, UnreadableLoss
from tests.zoo.libraries import Library
from tests.zoo.plain import frozen
from tests.zoo.program import EXACT, FLOAT32, Loss, Program, refused, Rows
from tests.zoo.samples import CLASSES, WORDS, parts, pictures, sentences, sounds

T = Library("transformers")
P = Library("peft")

SIZES: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SHORT: dict[str, Any] = {"max_position_embeddings": 16}
VISION = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12, "image_size": 32, "patch_size": 8}
COUPLED = refused(CoupledLoss, "across")
SEVERAL = refused(SeveralCounts, "counts=")
AWAKE = refused(BatchNormError, "BatchNorm")

def asking(*given: str, **renamed: str) -> Loss:
    """The model's own loss, called with these parts of the batch, some under another name."""
    names = {**{name: name for name in given}, **renamed}
    return lambda model, batch: model(**{argument: batch[name] for argument, name in names.items()}).loss

def made(cls: str, config: str, **settings: Any) -> Callable[[], nn.Module]:  # a model of a configuration
    return lambda: getattr(T, cls)(getattr(T, config)(**settings))

def eager_experts(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Experts in plain torch: the grouped product has no float64."""

    def eager() -> nn.Module:
        model: Any = build()
        model.set_experts_implementation("eager")
        assert isinstance(model, nn.Module)
        return model

    return eager

def tuned(kind: str, **settings: Any) -> Callable[[], nn.Module]:  # a Llama with adapters of this kind

    def build() -> nn.Module:
        model = P.get_peft_model(LLAMA(), getattr(P, kind)(task_type="CAUSAL_LM", **settings))
        assert isinstance(model, nn.Module)
        return model

    return build

LLAMA_LIKE: dict[str, Any] = {**SIZES, **SHORT, "num_key_value_heads": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = made("LlamaForCausalLM", "LlamaConfig", **LLAMA_LIKE)
BERT = {**SIZES, **DRY, **SHORT}
T5 = {"vocab_size": WORDS, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0}
GPT2: dict[str, Any] = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}
SPEECH = {
    "vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12, "conv_dim": (8, 8), "conv_stride": (5, 4), "conv_kernel": (10, 4),
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
    "feat_proj_dropout": 0.0, "final_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False, "pad_token_id": 0, "feat_extract_norm": "layer",
}
WHISPER = {
    "vocab_size": WORDS, "num_mel_bins": 8, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 12, "decoder_ffn_dim": 12,
    "max_source_positions": 10, "max_target_positions": 10, "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}
CLIP = {"text_config": {**SIZES, **SHORT, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}, "vision_config": VISION, "projection_dim": 6}
TEXT = ("input_ids", "attention_mask")

def clip_across(model: Any, b: Rows) -> Tensor:  # CLIP's loss over the embeddings of all micro-batches
    out = model(input_ids=b["input_ids"], pixel_values=b["pixel_values"])
    pair = across.offset() + torch.arange(len(out.image_embeds), device=out.image_embeds.device)
    scale = model.logit_scale.exp()
    by_text = F.cross_entropy(scale * out.text_embeds @ across.gather(out.image_embeds).T, pair)
    by_image = F.cross_entropy(scale * out.image_embeds @ across.gather(out.text_embeds).T, pair)
    return (by_text + by_image) / 2

def by_hand(model: Any, b: Rows) -> Tensor:  # the language model's loss as people write it around `logits`, shifted
    logits = model(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits
    return F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), b["next"][:, 1:].reshape(-1))

def preferred(model: Any, b: Rows) -> Tensor:  # DPO with a Llama and a frozen reference, both answers in one forward
    tokens = torch.cat([b["input_ids"], b["input_ids"].flip(1)])
    kept = torch.cat([b["attention_mask"], b["attention_mask"].flip(1)])

    def chances(network: Any) -> Tensor:
        scores = network(input_ids=tokens).logits[:, :-1].log_softmax(-1)
        return (scores.gather(2, tokens[:, 1:, None])[..., 0] * kept[:, 1:]).sum(1)

    with torch.no_grad():
        better, worse = chances(model["reference"]).chunk(2)
    chosen, rejected = chances(model["policy"]).chunk(2)
    return -F.logsigmoid(0.1 * ((chosen - better) - (rejected - worse))).mean()

def checkpointing(model: Any) -> nn.Module:  # with activations computed again in backward, as Trainer turns it on
    model.gradient_checkpointing_enable()
    assert isinstance(model, nn.Module)
    return model

def causal(name: str, cls: str, config: str, *, quick: bool = False, **settings: Any) -> Program:
    """A language model with its own loss."""
    return Program(name, made(cls, config, **settings), sentences, asking(*TEXT, labels="next"), "transformers", tolerance=FLOAT32, quick=quick)

def headed(name: str, cls: str, *, quick: bool = False, **labels: str) -> Program:  # BERT with a head and its own loss
    return Program(name, made(cls, "BertConfig", **BERT, num_labels=CLASSES), sentences, asking(*TEXT, **labels), "transformers", quick=quick)

def adapted(name: str, kind: str, **settings: Any) -> Program:  # a language model with adapters
    due = refused(UnreadableLoss, "once") if kind == "AdaLoraConfig" else EXACT  # its identity may be data
    return Program(name, tuned(kind, **settings), sentences, asking(*TEXT, labels="next"), "peft", due, due, FLOAT32)

HUGGING_FACE = [
    causal("gpt2", "GPT2LMHeadModel", "GPT2Config", quick=True, **GPT2),
    causal("llama", "LlamaForCausalLM", "LlamaConfig", quick=True, **LLAMA_LIKE),
    causal("mamba", "MambaForCausalLM", "MambaConfig", vocab_size=WORDS, hidden_size=8, state_size=4, num_hidden_layers=1, conv_kernel=2),
    Program("mixtral", eager_experts(made("MixtralForCausalLM", "MixtralConfig", **LLAMA_LIKE, num_local_experts=2, num_experts_per_tok=1)), sentences, asking(*TEXT, labels="next"), "transformers", tolerance=FLOAT32),
    Program("mixtral-router-loss", eager_experts(made("MixtralForCausalLM", "MixtralConfig", **LLAMA_LIKE, num_local_experts=2, num_experts_per_tok=1, output_router_logits=True, router_aux_loss_coef=0.1)), sentences, asking(*TEXT, labels="next"), "transformers", accumulator=COUPLED, big_step=COUPLED),
    Program("llama-loss-by-hand", LLAMA, sentences, by_hand, "transformers", tolerance=FLOAT32),
    Program("llama-one-by-one", LLAMA, sentences, asking(*TEXT, labels="next"), "transformers", tolerance=FLOAT32, cuts=(1, 1, 1, 1), micro_batch=1),
    Program("llama-dpo", lambda: parts(policy=LLAMA(), reference=frozen(LLAMA())), sentences, preferred, "transformers", tolerance=FLOAT32),
    headed("bert-masked-lm", "BertForMaskedLM", quick=True, labels="hidden"),
    headed("bert-classification", "BertForSequenceClassification", quick=True, labels="class"),
    Program("bert-regression", made("BertForSequenceClassification", "BertConfig", **BERT, num_labels=1), sentences, asking(*TEXT, labels="score"), "transformers"),
    headed("bert-tagging", "BertForTokenClassification", quick=True, labels="tags"),
    Program("bert-question-answering", made("BertForQuestionAnswering", "BertConfig", **BERT), sentences, asking(*TEXT, start_positions="begin", end_positions="end"), "transformers"),
    Program("bert-pretraining", made("BertForPreTraining", "BertConfig", **BERT), sentences, asking(*TEXT, labels="hidden", next_sentence_label="pair"), "transformers", accumulator=SEVERAL),
    Program("bert-pretraining-with-counts", made("BertForPreTraining", "BertConfig", **BERT), sentences, asking(*TEXT, labels="hidden", next_sentence_label="pair"), "transformers", settings={"counts": lambda b: ((b["hidden"] != -100).sum(), len(b["pair"]))}),
    Program("bert-multiple-choice", made("BertForMultipleChoice", "BertConfig", **BERT), sentences, asking(input_ids="choices", labels="choice"), "transformers"),
    Program("t5", made("T5ForConditionalGeneration", "T5Config", **T5), sentences, asking(*TEXT, labels="next"), "transformers", tolerance=FLOAT32),
    Program("wav2vec2-ctc", made("Wav2Vec2ForCTC", "Wav2Vec2Config", **SPEECH, ctc_loss_reduction="mean"), sounds, asking("input_values", "labels"), "transformers", tolerance=FLOAT32),
    Program("whisper", made("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER), sounds, asking("input_features", "labels"), "transformers", tolerance=FLOAT32),
    Program("vit", made("ViTForImageClassification", "ViTConfig", **VISION, **DRY, num_labels=CLASSES), pictures, asking("pixel_values", "labels"), "transformers"),
    Program("segformer", made("SegformerForSemanticSegmentation", "SegformerConfig", num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 8], patch_sizes=[3, 3], strides=[2, 2], num_attention_heads=[1, 2], mlp_ratios=[1, 1], decoder_hidden_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0, num_labels=CLASSES), pictures, asking("pixel_values", labels="map"), "transformers", accumulator=AWAKE),
    Program("clip-model", made("CLIPModel", "CLIPConfig", **CLIP), pictures, lambda m, b: m(input_ids=b["input_ids"], pixel_values=b["pixel_values"], return_loss=True).loss, "transformers", accumulator=COUPLED, big_step=COUPLED),
    Program("clip-model-across", made("CLIPModel", "CLIPConfig", **CLIP), pictures, clip_across, "transformers", accumulator=refused(CoupledLoss, "BigStep")),
    Program("gpt2-gradient-checkpointing", lambda: checkpointing(made("GPT2LMHeadModel", "GPT2Config", **GPT2)()), sentences, asking(*TEXT, labels="next"), "transformers", tolerance=FLOAT32),
    adapted("lora", "LoraConfig", r=2, target_modules=["q_proj", "v_proj"]),
    adapted("dora-on-the-head", "LoraConfig", r=2, target_modules=["q_proj", "lm_head"], use_dora=True),
    adapted("adalora", "AdaLoraConfig", init_r=3, target_r=2, total_step=10, target_modules=["q_proj", "v_proj"]),
    adapted("ia3", "IA3Config", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    adapted("prompt-tuning", "PromptTuningConfig", num_virtual_tokens=3),
]
