"""A tokenizer without a network: one token per character, special tokens and a chat template of its own."""

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS_ID = 1


@pytest.fixture(scope="session")
def char_tokenizer():
    vocabulary = {"<unk>": 0, "<s>": BOS_ID, "</s>": 2, "<user>": 3, "<assistant>": 4}
    for character in "0123456789+-=abcdefghijklmnopqrstuvwxyz ?":
        vocabulary[character] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS_ID)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template="{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<assistant>",
    )
