"""How large the lock-step benchmark's works are: for an H200, or tiny, so that it can be tried on any machine."""

from dataclasses import dataclass

FEW, MANY = 4, 16  # micro-batches in a window
WIDTH = 64  # channels that a ResNet begins with


@dataclass(frozen=True)
class Images:
    """A batch of square images with one label each."""

    samples: int
    pixels: int
    classes: int = 10


@dataclass(frozen=True)
class Pairs:
    """A batch of images and texts that belong together, and the two small transformers that see them."""

    samples: int
    micro_batch: int
    pixels: int = 64
    patch: int = 8
    tokens: int = 32
    vocabulary: int = 8192
    width: int = 384
    layers: int = 6
    heads: int = 6
    embedding: int = 256


@dataclass(frozen=True)
class Scale:
    """The defaults are what is measured on an H200; `small` batches are those that gradients are judged on."""

    device: str
    resnet18: Images = Images(2048, 32)
    resnet50: Images = Images(256, 224, classes=1000)
    small_resnet18: Images = Images(64, 32)
    small_resnet50: Images = Images(64, 64, classes=1000)
    width: int = WIDTH
    pairs: Pairs = Pairs(2048, 128)
    # Towers as large as a ViT-B/32: the device has more to do than the host that launches it.
    wide_pairs: Pairs = Pairs(1024, 128, pixels=224, patch=32, width=768, layers=12, heads=12, embedding=512)
    small_pairs: int = 64
    # 26 samples are cut into 7, 7, 6 and 6.
    exact: Images = Images(26, 64)
    exact_micro_batch: int = 7


def scale(device: str, *, tiny: bool) -> Scale:
    """Return the sizes for this run."""
    if not tiny:
        return Scale(device)
    return Scale(
        device,
        resnet18=Images(32, 16),
        resnet50=Images(32, 64),
        small_resnet18=Images(16, 16),
        small_resnet50=Images(32, 64),
        width=8,
        pairs=Pairs(32, 4, pixels=16, tokens=8, vocabulary=64, width=32, layers=2, heads=2, embedding=16),
        wide_pairs=Pairs(16, 4, pixels=16, tokens=8, vocabulary=64, width=48, layers=2, heads=2, embedding=16),
        small_pairs=16,
        exact=Images(11, 32),
        exact_micro_batch=3,
    )
