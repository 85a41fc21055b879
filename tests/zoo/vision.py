# ruff: noqa: E501, D103, I001 - a row of a table is a line
# fmt: off
"""Models and losses of timm, torchvision, diffusers, segmentation-models-pytorch."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.errors import BatchNormError, CoupledLoss, LossError
from tests.zoo.libraries import Library
from tests.zoo.program import EXACT, FLOAT32, ROUNDING, Expected, Loss, Program, refused, Rows
from tests.zoo.samples import CLASSES, pictures

M = Library("timm")
TIMM_LOSS = Library("timm.loss")
V = Library("torchvision.models")
OPS = Library("torchvision.ops")
D = Library("diffusers")
S = Library("segmentation_models_pytorch.losses")
AWAKE = refused(BatchNormError, "BatchNorm")
COUPLED = refused(CoupledLoss, "across")

def timm(name: str, accumulator: Expected = EXACT) -> Program:  # one of timm's own test models with cross-entropy
    size = {"img_size": 32} if "vit" in name else {}
    return Program(f"timm-{name.removeprefix('test_')}", lambda: M.create_model(name, num_classes=CLASSES, **size), pictures, scored(F.cross_entropy), "timm", accumulator=accumulator)

def scored(criterion: Callable[..., Tensor], target: str = "labels") -> Loss:  # a criterion of scores and targets
    return lambda model, b: criterion(model(b["pixel_values"]), b[target])

def classifier() -> nn.Module:  # something small that gives scores
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES))

def painter(outputs: int = CLASSES) -> nn.Module:  # something small that gives a score to every pixel
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, outputs, 1))

def segmentation_loss(
    name: str, kind: str, expected: Expected = COUPLED, *, binary: bool = False, accumulator: Expected | None = None, **settings: Any
) -> Program:  # a loss of segmentation-models-pytorch
    def loss(model: Any, b: Rows) -> Tensor:
        criterion = getattr(S, kind)(mode="binary" if binary else "multiclass", **settings)
        return criterion(model(b["pixel_values"]), b["shape" if binary else "map"])

    return Program(f"smp-{name}", lambda: painter(1 if binary else CLASSES), pictures, loss, "segmentation_models_pytorch", accumulator=accumulator or expected, big_step=expected, float64=kind != "LovaszLoss", tolerance=FLOAT32 if kind == "LovaszLoss" else ROUNDING)

def resnet() -> nn.Module:  # a ResNet of one block per stage
    model = V.resnet.ResNet(V.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)
    assert isinstance(model, nn.Module)
    return model

UNET = {"sample_size": 32, "block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 2, "attention_head_dim": 4}

def noise_loss(*, velocity: bool = False, text: bool = False) -> Loss:
    """What a diffusion model learns; noise and time come with the batch."""

    def loss(model: Any, b: Rows) -> Tensor:
        scheduler = D.DDPMScheduler(num_train_timesteps=50)
        noisy = scheduler.add_noise(b["pixel_values"], b["noise"], b["time"])
        out = model(noisy, b["time"], **({"encoder_hidden_states": b["text"]} if text else {})).sample
        return F.mse_loss(out, scheduler.get_velocity(b["pixel_values"], b["noise"], b["time"]) if velocity else b["noise"])

    return loss

def flow_matching(model: Any, b: Rows) -> Tensor:  # the velocity from noise to picture
    t = (b["time"].to(b["noise"].dtype) + 0.5)[:, None, None, None] / 50
    return F.mse_loss(model((1 - t) * b["noise"] + t * b["pixel_values"], b["time"]).sample, b["pixel_values"] - b["noise"])

def autoencoder(model: Any, b: Rows) -> Tensor:
    """Reconstruction and divergence of diffusers' own distribution, which sums per sample."""
    latent = model.encode(b["pixel_values"]).latent_dist
    return F.l1_loss(model.decode(latent.mode()).sample, b["pixel_values"]) + 1e-3 * latent.kl().sum() / len(b["pixel_values"])

def torchvision(name: str, build: Callable[[], Any], loss: Loss, accumulator: Expected = EXACT) -> Program:
    """A model or a loss of torchvision."""
    return Program(f"torchvision-{name}", build, pictures, loss, "torchvision", accumulator=accumulator)

def diffusers(name: str, build: Callable[[], Any], loss: Loss) -> Program:  # a model of diffusers
    return Program(f"diffusers-{name}", build, pictures, loss, "diffusers")

VISION = [
    timm("test_vit"),
    timm("test_resnet", AWAKE),
    timm("test_efficientnet_gn"),
    timm("test_nfnet"),
    Program("timm-label-smoothing", classifier, pictures, lambda m, b: TIMM_LOSS.LabelSmoothingCrossEntropy(smoothing=0.1)(m(b["pixel_values"]), b["labels"]), "timm"),
    torchvision("resnet", resnet, scored(F.cross_entropy), AWAKE),
    torchvision("focal-loss", painter, lambda m, b: OPS.sigmoid_focal_loss(m(b["pixel_values"]), b["shape"].expand(-1, CLASSES, -1, -1), reduction="mean")),
    diffusers("unet", lambda: D.UNet2DModel(**UNET, down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")), noise_loss()),
    diffusers("unet-with-text", lambda: D.UNet2DConditionModel(**UNET, in_channels=3, out_channels=3, cross_attention_dim=8, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")), noise_loss(velocity=True, text=True)),
    diffusers("flow-matching", lambda: D.UNet2DModel(**UNET, down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D")), flow_matching),
    diffusers("autoencoder", lambda: D.AutoencoderKL(block_out_channels=(8,), norm_num_groups=2, latent_channels=2), autoencoder),
    segmentation_loss("dice", "DiceLoss"),
    segmentation_loss("lovasz", "LovaszLoss", refused(LossError, "across")),
    segmentation_loss("lovasz-per-image", "LovaszLoss", EXACT, binary=True, per_image=True),
]
