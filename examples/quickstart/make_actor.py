"""Stage 2a: a small Llama with random weights and a tokenizer of its own, saved as a Hugging Face folder."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from miles.utils.strict_parser import StrictParser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<unk>"]
PIECES = r"\d|[^\d]+"
"""Every digit is a token, and so is every run of other characters: words, operators, a minus sign."""


def make_tokenizer(texts: list[str]) -> "PreTrainedTokenizerFast":
    """A tokenizer over all pieces that occur in `texts`; decoding joins the pieces and gives the text back."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = sorted({piece for text in texts for piece in re.findall(PIECES, text)} | set("0123456789"))
    vocabulary = {token: number for number, token in enumerate(SPECIAL_TOKENS + pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")  # pyright: ignore
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def main() -> None:
    parser = StrictParser(description=__doc__)
    parser.add_argument("--problems", type=Path, nargs="+", required=True, help="JSONL files of problems")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--num-kv-heads", type=int, default=2)
    parser.add_argument("--ffn-hidden-size", type=int, default=384)
    parser.add_argument("--max-position-embeddings", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    # Only now: they take seconds, which a mistake or --help need not wait for.
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    rows = [json.loads(line) for path in options.problems for line in path.read_text().splitlines()]
    tokenizer = make_tokenizer([text for row in rows for text in (row["prompt"], row["label"])])
    special = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=options.hidden_size,
            intermediate_size=options.ffn_hidden_size,
            num_hidden_layers=options.num_layers,
            num_attention_heads=options.num_heads,
            num_key_value_heads=options.num_kv_heads,
            max_position_embeddings=options.max_position_embeddings,
            pad_token_id=special["<pad>"],
            bos_token_id=special["<bos>"],
            eos_token_id=special["<eos>"],
            tie_word_embeddings=False,
        )
    )
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"{options.out}: {model.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary")


if __name__ == "__main__":
    main()
