"""Stand-in for torchvision in the process tree of an SGLang server on a CPU: text models import it, none calls it."""

from torchvision import transforms  # noqa: F401

__version__ = "0.0.0"
