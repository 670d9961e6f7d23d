"""Fixtures for every folder of tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

VOCABULARY = ["<pad>", "<eos>", "<unk>", *"0123456789+-*/= ", *"abcdefghijklmnopqrstuvwxyz", "?", ".", "\n"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Two processes run the suite: whole online runs, which wait a good deal, beside all else, and then unit files."""
    from xdist.scheduler import LoadScopeScheduling

    class OnlineRunsBesideTheRest(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith("tests/unit/"):
                # They come last, to whoever is free.
                return nodeid.split("::")[0]
            # Chosen so that both end at about the same time.
            online = ("tests/e2e/test_online.py", "tests/e2e/test_interruption.py", "tests/e2e/test_examples.py")
            return "online" if nodeid.startswith(online) else "the rest"

    return OnlineRunsBesideTheRest(config, log)


@pytest.fixture(scope="session")
def make_hf_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that writes a small random Llama with a character tokenizer as a Hugging Face folder."""

    def make(*, seed: int = 0, **settings: Any) -> Path:
        import torch
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

        folder = tmp_path_factory.mktemp("hf_model")
        core = Tokenizer(models.WordLevel({token: number for number, token in enumerate(VOCABULARY)}, "<unk>"))
        core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        )
        tokenizer.save_pretrained(folder)
        defaults: dict[str, Any] = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": None,
        }
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**(defaults | settings))).float().save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_hf_model(make_hf_model: Callable[..., Path]) -> Path:
    """A two-layer Llama of 32 dimensions; not to be written to."""
    return make_hf_model()
