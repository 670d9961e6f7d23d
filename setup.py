"""Packaging. Every pin lives in requirements/*.txt; this file only names them."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def pins(name: str) -> list[str]:
    """The requirements of requirements/NAME.txt, without comments."""
    lines = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def version() -> str:
    """The version that miles/__init__.py states."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "miles" / "__init__.py").read_text(encoding="utf-8"), re.M)
    assert found is not None
    return found.group(1)


setup(
    name="miles",
    version=version(),
    description="Value pretraining and PPO for language models on Megatron-core, SGLang and Ray.",
    python_requires=">=3.11",
    packages=find_packages(include=["miles", "miles.*"]),
    package_data={"miles.backends.sglang": ["cpu_stand_ins/**/*"]},
    install_requires=pins("base"),
    extras_require={name: pins(name) for name in ("cpu", "gpu", "te", "wandb", "examples", "smollm2", "dev")},
    entry_points={"console_scripts": ["miles=miles.cli:main"]},
)
