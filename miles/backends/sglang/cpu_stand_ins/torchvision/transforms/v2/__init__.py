"""Second generation of the transforms: importable, and every call raises."""

from torchvision.transforms import InterpolationMode, __getattr__  # noqa: F401
