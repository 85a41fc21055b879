"""The networks of the lock-step benchmark, in plain torch: ResNets with BatchNorm, and two small transformers."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.lockstep_scale import Pairs


def _norm_relu(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


def _convolution(before: int, after: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)


class Basic(nn.Module):
    """Two convolutions, added to what came in."""

    expansion = 1

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            _convolution(before, width, 3, stride),
            *_norm_relu(width),
            _convolution(width, width, 3),
            nn.BatchNorm2d(width),
        )
        self.shortcut = _shortcut(before, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add, then rectify."""
        return F.relu(self.branch(x) + self.shortcut(x), inplace=True)


class Bottleneck(nn.Module):
    """Narrow, convolve, widen, and add to what came in; the stride is in the middle."""

    expansion = 4

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = width * self.expansion
        self.branch = nn.Sequential(
            _convolution(before, width, 1),
            *_norm_relu(width),
            _convolution(width, width, 3, stride),
            *_norm_relu(width),
            _convolution(width, after, 1),
            nn.BatchNorm2d(after),
        )
        self.shortcut = _shortcut(before, after, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Add, then rectify."""
        return F.relu(self.branch(x) + self.shortcut(x), inplace=True)


def _shortcut(before: int, after: int, stride: int) -> nn.Module:
    if before == after and stride == 1:
        return nn.Identity()
    return nn.Sequential(_convolution(before, after, 1, stride), nn.BatchNorm2d(after))


def _resnet(
    block: type[Basic | Bottleneck], depths: tuple[int, ...], stem: nn.Module, width: int, classes: int
) -> nn.Module:
    layers: list[nn.Module] = [stem]
    before = width
    for stage, depth in enumerate(depths):
        for place in range(depth):
            layers.append(block(before, width << stage, 2 if stage and not place else 1))
            before = (width << stage) * block.expansion
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


def resnet18(classes: int, width: int = 64) -> nn.Module:
    """Return the ResNet-18 that small images are trained with: a stem of 3 × 3, without pooling."""
    stem = nn.Sequential(_convolution(3, width, 3), *_norm_relu(width))
    return _resnet(Basic, (2, 2, 2, 2), stem, width, classes)


def resnet50(classes: int, width: int = 64) -> nn.Module:
    """Return the ResNet-50 of large images."""
    stem = nn.Sequential(_convolution(3, width, 7, 2), *_norm_relu(width), nn.MaxPool2d(3, 2, 1))
    return _resnet(Bottleneck, (3, 4, 6, 3), stem, width, classes)


class Projected(nn.Module):
    """Features, then what Barlow Twins and VICReg put behind them: a projector with BatchNorm. Sees two views."""

    def __init__(self, features: nn.Module, width: int, embedding: int) -> None:
        super().__init__()
        self.features = features
        self.projector = nn.Sequential(
            nn.Linear(width, width, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(inplace=True),
            nn.Linear(width, embedding),
        )

    def forward(self, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        """Each view by itself: the layers are used twice."""
        return self.projector(self.features(one)), self.projector(self.features(other))


class TwoTowers(nn.Module):
    """A transformer for images and one for texts, and a learned temperature, after CLIP."""

    def __init__(self, size: Pairs) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, size.width, size.patch, size.patch)
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.image_places = nn.Parameter(0.02 * torch.randn((size.pixels // size.patch) ** 2, size.width))
        self.text_places = nn.Parameter(0.02 * torch.randn(size.tokens, size.width))
        self.image_tower, self.text_tower = _tower(size), _tower(size)
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return embeddings of length 1, and what their products are multiplied with."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        seen = self.image_tower(patches + self.image_places)
        read = self.text_tower(self.tokens(texts) + self.text_places)
        return F.normalize(seen, dim=-1), F.normalize(read, dim=-1), self.scale()

    def scale(self) -> Tensor:
        """Return the inverse temperature."""
        return self.log_scale.exp()


class _Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def _tower(size: Pairs) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        size.width,
        size.heads,
        4 * size.width,
        dropout=0.0,
        activation=F.gelu,
        batch_first=True,
        norm_first=True,
    )
    encoder = nn.TransformerEncoder(layer, size.layers, nn.LayerNorm(size.width), enable_nested_tensor=False)
    return nn.Sequential(encoder, _Pool(), nn.Linear(size.width, size.embedding, bias=False))


def seeded(make: Callable[[], nn.Module], device: str) -> nn.Module:
    """Return the same model for everyone, in training mode."""
    torch.manual_seed(1)
    return make().to(device).train()
