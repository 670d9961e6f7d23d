#!/usr/bin/env bash
# Proves on one GPU, in under 8 minutes, what the CPU tests cannot: the Megatron step equals the CPU's step, a checkpoint
# goes CPU -> GPU -> CPU, and tokens per second. Without a GPU it says so and does nothing.
#
# Usage: tools/gpu_check.sh          PYTHON=... chooses the interpreter (default: .venv/bin/python, else python3)
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-}
if [ -z "$python" ]; then
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi

if ! "$python" -c "import torch" 2>/dev/null; then
    echo "gpu_check: SKIPPED: $python has no torch; nothing was checked" >&2
    exit 0
fi
if ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null; then
    echo "gpu_check: SKIPPED: torch.cuda.is_available() is false on this machine; nothing was checked"
    exit 0
fi

missing=$("$python" - <<'PY'
import importlib.util

wanted = {"megatron.core": "megatron-core==0.16.1", "transformers": "transformers", "safetensors": "safetensors",
          "psutil": "psutil", "pydantic_settings": "pydantic-settings", "pytest": "pytest"}


def absent(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is None
    except ModuleNotFoundError:
        return True


print(" ".join(package for name, package in wanted.items() if absent(name)))
PY
)
if [ -n "$missing" ]; then
    echo "gpu_check: a GPU is here, but these packages are not: $missing (pip install them, or the extra 'gpu')" >&2
    exit 1
fi

"$python" - <<'PY'
import importlib.util

import torch

engine = "installed" if importlib.util.find_spec("transformer_engine") else "not installed (local layer spec)"
print(f"gpu_check: {torch.cuda.get_device_name(0)}, torch {torch.__version__}, Transformer Engine {engine}", flush=True)
PY
started=$SECONDS
status=0
PYTHONUNBUFFERED=1 timeout --kill-after=10 470 "$python" -m pytest tests/gpu -q -s -p no:cacheprovider || status=$?
if [ "$status" -eq 124 ]; then
    echo "gpu_check: FAILED: not done within 470 s" >&2
elif [ "$status" -ne 0 ]; then
    echo "gpu_check: FAILED after $((SECONDS - started)) s" >&2
else
    echo "gpu_check: passed in $((SECONDS - started)) s"
fi
exit "$status"
