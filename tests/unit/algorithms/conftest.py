import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The NumPy definitions in references.py."""
    path = Path(__file__).with_name("references.py")
    spec = importlib.util.spec_from_file_location("algorithm_references", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
