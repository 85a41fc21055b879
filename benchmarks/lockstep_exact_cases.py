"""What is held against one big batch: networks with BatchNorm, CLIP, and losses of the whole batch.

Dropout and stochastic depth are off: cut batches draw other random numbers than whole ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import lockstep_losses as losses
from benchmarks import lockstep_networks as networks
from benchmarks.lockstep_libraries import imported
from benchmarks.lockstep_resnet import images, loss_and_outputs
from benchmarks.lockstep_scale import Scale
from benchmarks.lockstep_truth import Activations, Batch, Case

INSIDE: tuple[Activations, ...] = ("keep", "offload")  # where micro-batches meet inside the model
OUTSIDE: tuple[Activations, ...] = ("keep", "recompute")
CLASSES = 10
TEXT = 12  # tokens
EXAMPLES = ("clip", "supcon", "info_nce", "barlow_twins", "vicreg", "moe", "dice", "correlation", "rmse")
MEETING_INSIDE = ("moe",)


@dataclass(frozen=True)
class Compared:
    """A case, whose model it is, and where activations may stay."""

    name: str
    library: str
    case: Case
    activations: tuple[Activations, ...]


Make = Callable[[], Compared]


def cases(scale: Scale) -> dict[str, Make]:
    """Everything, by name, to be made when it is its turn: a library that is not there fails alone."""
    return {
        "ResNet-18": partial(_network, scale, "ResNet-18", INSIDE),
        "ResNet-50": partial(_network, scale, "ResNet-50", INSIDE),
        "MobileNet": partial(_network, scale, "MobileNet", ("keep",)),
        "EfficientNet-B0": partial(_network, scale, "EfficientNet-B0", ("keep",)),
        "CLIP": partial(_clip, scale),
        "Barlow Twins": partial(_views, scale, "Barlow Twins", losses.barlow_twins),
        "VICReg": partial(_views, scale, "VICReg", losses.vicreg),
        **{name: partial(_example, scale, name) for name in EXAMPLES},
    }


def _network(scale: Scale, name: str, activations: tuple[Activations, ...]) -> Compared:
    own = {"ResNet-18": networks.resnet18, "ResNet-50": networks.resnet50}.get(name)
    candidates: dict[str, Callable[[], nn.Module] | None] = {
        "torchvision": _torchvision(name),
        "timm": _timm(name),
        "own": None if own is None else partial(own, CLASSES, width=scale.width),
        "transformers": _hugging_face(name) if own is None else None,
    }
    for library, make in candidates.items():
        if make is not None:
            case = Case(
                partial(networks.seeded, make, scale.device), images(scale.exact, scale.device), loss_and_outputs
            )
            return Compared(name, library, case, activations)
    raise ImportError("neither torchvision, timm nor transformers is here")


def _torchvision(name: str) -> Callable[[], nn.Module] | None:
    models = imported("torchvision.models")
    if models is None:
        return None
    return {
        "ResNet-18": partial(models.resnet18, num_classes=CLASSES),
        "ResNet-50": partial(models.resnet50, num_classes=CLASSES),
        "MobileNet": partial(models.mobilenet_v3_small, num_classes=CLASSES, dropout=0.0),
        "EfficientNet-B0": partial(models.efficientnet_b0, num_classes=CLASSES, dropout=0.0, stochastic_depth_prob=0.0),
    }[name]


def _timm(name: str) -> Callable[[], nn.Module] | None:
    timm = imported("timm")
    if timm is None:
        return None
    known = {
        "ResNet-18": "resnet18",
        "ResNet-50": "resnet50",
        "MobileNet": "mobilenetv3_small_100",
        "EfficientNet-B0": "efficientnet_b0",
    }
    return partial(timm.create_model, known[name], num_classes=CLASSES, drop_rate=0.0, drop_path_rate=0.0)


class Logits(nn.Module):
    """A model of Hugging Face's that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        # Its own weights, of 0.02 in norms, too, leave nothing of an image behind some layers.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.ones_(module.weight)

    def forward(self, pixels: Tensor) -> Tensor:
        """Without its name."""
        return self.model(pixel_values=pixels).logits


def _hugging_face(name: str) -> Callable[[], nn.Module] | None:
    library = imported("transformers")
    if library is None:
        return None
    if name == "MobileNet":
        config = library.MobileNetV2Config(num_labels=CLASSES, classifier_dropout_prob=0.0, tf_padding=False)
        return lambda: Logits(library.MobileNetV2ForImageClassification(config))
    config = library.EfficientNetConfig(
        num_labels=CLASSES,
        width_coefficient=1.0,
        depth_coefficient=1.0,
        hidden_dim=1280,
        dropout_rate=0.0,
        drop_connect_rate=0.0,
    )
    return lambda: Logits(library.EfficientNetForImageClassification(config))


def _clip(scale: Scale) -> Compared:
    library = imported("transformers")
    if library is None:
        raise ImportError("transformers is not here")
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**layers, "vocab_size": 99, "max_position_embeddings": TEXT, "bos_token_id": 0, "eos_token_id": 98}
    vision = {**layers, "image_size": scale.exact.pixels, "patch_size": 16}
    config = library.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    batch = images(scale.exact, scale.device)
    texts = torch.randint(1, 98, (scale.exact.samples, TEXT), device=scale.device)
    texts[:, -1] = 98
    case = Case(
        partial(networks.seeded, lambda: library.CLIPModel(config), scale.device),
        {"images": batch["images"], "texts": texts},
        _hugging_face_clip,
    )
    return Compared("CLIP", "transformers", case, OUTSIDE)


def _hugging_face_clip(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    found = model(input_ids=batch["texts"], pixel_values=batch["images"])
    pictures, texts = found.image_embeds, found.text_embeds
    return losses.clip(pictures, texts, model.logit_scale.exp()), torch.cat([pictures, texts], dim=1)


def _views(scale: Scale, name: str, loss: Callable[[Tensor, Tensor], Tensor]) -> Compared:
    """Two noisy views of each image, through a network with BatchNorm: micro-batches meet in both, model and loss."""
    batch = images(scale.exact, scale.device)["images"]
    views = {view: batch + 0.1 * torch.randn_like(batch) for view in ("one", "other")}

    def network() -> nn.Module:
        return networks.Projected(networks.resnet18(16, width=8), 16, 8)

    def loss_of(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        found = model(batch["one"], batch["other"])
        return loss(*found), torch.cat(found, dim=1)

    return Compared(name, "own", Case(partial(networks.seeded, network, scale.device), views, loss_of), INSIDE)


def _example(scale: Scale, name: str) -> Compared:
    """A worked example of the repository's; its batch is a tuple or a dict, and its model may be anything."""
    example = import_module(f"examples.coupled.{name}")
    torch.manual_seed(0)
    given = example.samples(scale.exact.samples)
    batch = dict(given) if isinstance(given, dict) else {str(place): each for place, each in enumerate(given)}

    def loss_of(model: Any, piece: Batch) -> tuple[Tensor, Tensor]:
        first = next(iter(piece.values()))
        loss = example.loss_fn(model, piece if isinstance(given, dict) else tuple(piece.values()))
        return loss, torch.zeros(len(first), 0, device=first.device)  # it tells no outputs

    there = {key: each.to(scale.device) for key, each in batch.items()}
    case = Case(partial(networks.seeded, example.network, scale.device), there, loss_of)
    return Compared(name, "examples", case, OUTSIDE if name not in MEETING_INSIDE else ("keep",))
