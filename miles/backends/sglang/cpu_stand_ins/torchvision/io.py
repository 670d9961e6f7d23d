"""Image files: importable, and every call raises."""

from enum import Enum

from torchvision.transforms import __getattr__  # noqa: F401


class ImageReadMode(Enum):
    """Colour modes, with the values torchvision gives them."""

    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4
