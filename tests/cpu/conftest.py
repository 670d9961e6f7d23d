"""Small models with a tokenizer of their own, and one SGLang server that all CPU tests share: it starts slowly."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TINY = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save_tokenizer(folder: Path) -> None:
    """Character tokenizer: ids 0 to 3 are special, printable ASCII follows; 99 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3}
    vocabulary.update({chr(code): code - 28 for code in range(32, 127)})
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(folder)


@pytest.fixture(scope="session")
def make_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`make_tiny_model("Llama" | "Qwen2" | "Qwen3", **config)` -> folder of a model with 0.1M random weights."""

    def make(family: str, *, seed: int = 0, **changes: Any) -> Path:
        import torch
        import transformers

        folder = tmp_path_factory.mktemp(f"tiny_{family.lower()}")
        config = getattr(transformers, f"{family}Config")(**{**TINY, "vocab_size": 99, **changes})
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Fresh biases are zero and norms one: a mistake in either would not show.
                if name.endswith("bias") or "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                # Sharper than the initial distribution, in which all tokens are nearly equal.
                elif "lm_head" in name or "embed_tokens" in name:
                    parameter.mul_(8.0)
        model.save_pretrained(folder)
        save_tokenizer(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_llama(make_tiny_model: Callable[..., Path]) -> Path:
    """Untied Llama with grouped-query attention; its vocabulary of 99 is padded by engines."""
    return make_tiny_model("Llama", tie_word_embeddings=False)


@pytest.fixture(scope="session")
def sglang_server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A running server of `tiny_llama`. A test that changes its weights puts them back."""
    from miles.backends.sglang.server import SGLangServer

    log = tmp_path_factory.mktemp("sglang") / "server.log"
    server = SGLangServer(tiny_llama, device="cpu", log_path=log, request_timeout_s=120.0)
    server.start()
    _SERVERS.append(server)
    yield server
    _stop_servers()


_SERVERS: list[Any] = []


def _stop_servers() -> None:
    while _SERVERS:
        _SERVERS.pop().stop()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Whole programs, which come next, want the cores and the memory that an idle server holds."""
    here = Path(__file__).parent
    if nextitem is None or here not in nextitem.path.parents:
        _stop_servers()
