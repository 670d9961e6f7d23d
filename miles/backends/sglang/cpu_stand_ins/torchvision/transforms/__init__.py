"""Names that SGLang and transformers import; the modes are real, every transform raises."""

from enum import Enum


class InterpolationMode(Enum):
    """Resampling modes, with the values torchvision gives them."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*args, **kwargs):
        raise NotImplementedError(f"torchvision.transforms.{name}: images are not served on a CPU without torchvision")

    return refuse


# Imported last, and here: otherwise `from torchvision.transforms import functional` would end in __getattr__.
import torchvision.transforms.functional  # noqa: E402
import torchvision.transforms.v2.functional  # noqa: E402, F401
