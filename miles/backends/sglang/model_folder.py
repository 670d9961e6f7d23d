"""What can be seen of a Hugging Face model folder without loading it: is it there, whole, and of one piece."""

from dataclasses import dataclass
from pathlib import Path

from miles.config.hf_folder import INDEX_FILE, highest_token_id, read_json_object, read_safetensors_header


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model's config.json that the engine's side needs."""

    architecture: str
    vocab_size: int
    context_length: int | None


def check_model_folder(folder: str | Path) -> ModelFacts:
    """Check config, weight files' sizes and the tokenizer's range, in milliseconds.

    Raises:
        ValueError: something is missing, truncated or does not fit; the line names the file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(
            f"model folder {folder} does not exist" if not folder.exists() else f"{folder} is not a folder"
        )
    config = read_json_object(folder / "config.json")
    text_config = config.get("text_config", config)
    if not isinstance(text_config.get("vocab_size"), int):
        raise ValueError(f"{folder / 'config.json'} names no vocab_size")
    index = folder / INDEX_FILE
    if index.exists():
        files = sorted({folder / name for name in read_json_object(index).get("weight_map", {}).values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model folder {folder} has no *.safetensors weight file")
    for file in files:
        if not file.is_file():
            raise ValueError(f"weight file {file} is missing, though the model's index names it")
        read_safetensors_header(file)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists() and not (folder / "tokenizer.model").exists():
        raise ValueError(f"model folder {folder} has no tokenizer (tokenizer.json or tokenizer.model)")
    if tokenizer.exists() and (highest := highest_token_id(tokenizer)) >= text_config["vocab_size"]:
        raise ValueError(
            f"{tokenizer} does not fit the model: token id {highest}, but vocab_size in config.json is "
            f"{text_config['vocab_size']}"
        )
    architectures = config.get("architectures") or ["unknown"]
    return ModelFacts(architectures[0], text_config["vocab_size"], text_config.get("max_position_embeddings"))
