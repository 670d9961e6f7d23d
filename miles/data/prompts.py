"""Prompts from a JSONL file: validated and tokenised once, reshuffled each epoch, resumable at any position."""

import hashlib
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles.contracts.canonical import StrictJsonError, canonical_json_bytes, parse_strict_json
from miles.data.sao import SEGMENT_KEY

_TOKENIZE_ROWS = 1024  # rows handed to the tokenizer at once
_IN_PLACE_OF_CONTENT = frozenset({"tool_calls", "function_call", "reasoning_content"})


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One prompt. `index` counts the rows kept, in file order; `prompt` is the text whose ids are `tokens`."""

    index: int
    prompt: str
    tokens: list[int]
    label: Any
    metadata: dict[str, Any]


def check_prompt_file(
    path: Path, *, input_key: str, metadata_key: str, apply_chat_template: bool, segments_allowed: bool = True
) -> None:
    """Look at every line of a file as `PromptSource` does, but for what only a tokenizer can tell.

    Args:
        segments_allowed: metadata may make a prompt's samples segments of compacted trajectories.

    Raises:
        ValueError: `path:line` and what was expected; a file without prompts.
    """
    empty = True
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                empty = False
                row = _parse_row(
                    line,
                    where=f"{path}:{number}",
                    input_key=input_key,
                    metadata_key=metadata_key,
                    messages_allowed=apply_chat_template,
                )
                if not row[input_key] and not apply_chat_template:
                    raise ValueError(f"{path}:{number}: the prompt is empty")
                if not segments_allowed and SEGMENT_KEY in (row.get(metadata_key) or {}):
                    raise ValueError(
                        f"{path}:{number}: {metadata_key!r} has {SEGMENT_KEY}, which needs --sao-compaction"
                    )
    if empty:
        raise ValueError(f"{path}: no prompts")


def _parse_row(
    line: bytes, *, where: str, input_key: str, metadata_key: str, messages_allowed: bool
) -> dict[str, Any]:
    try:
        row = parse_strict_json(line)
    except StrictJsonError as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
    if b"\\u" in line:
        try:
            canonical_json_bytes(row)
        except UnicodeEncodeError as error:
            lone = error.object[error.start]
            raise ValueError(
                f"{where}: {lone!r} is half of a character (a lone surrogate), which is no text"
            ) from None
    if input_key not in row:
        raise ValueError(f"{where}: no key {input_key!r}; the row has {sorted(row)}")
    if row.get(metadata_key) is not None and not isinstance(row[metadata_key], dict):
        raise ValueError(f"{where}: {metadata_key!r} must be a JSON object")
    prompt = row[input_key]
    if isinstance(prompt, str):
        return row
    if not messages_allowed:
        raise ValueError(f"{where}: {input_key!r} must be a string (messages need apply_chat_template)")
    if not (isinstance(prompt, list) and prompt):
        raise ValueError(f"{where}: {input_key!r} must be a string or a list of messages with a role")
    for number, message in enumerate(prompt):
        if (problem := _problem_of_message(message)) is not None:
            raise ValueError(f"{where}: message {number} of {input_key!r} {problem}")
    return row


def _problem_of_message(message: Any) -> str | None:
    """Why a template would write something else than what was meant; most write what is missing as nothing."""
    if not isinstance(message, dict):
        return f"must be an object, got {type(message).__name__}"
    if not isinstance(message.get("role"), str):
        return f"must have a role that is text; it has {sorted(message)}"
    content = message.get("content")
    if content is None and _IN_PLACE_OF_CONTENT & message.keys():
        return None
    if "content" not in message:
        return f"must have content; it has {sorted(message)}"
    if content is None:
        return "must have content that is text, got null"
    parts = isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content)
    if isinstance(content, str) or parts or message["role"] == "tool":
        return None
    return f"must have content that is text, got {type(content).__name__}"


def _digest64(line: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(line, digest_size=8).digest(), "big")


class PromptSource:
    """Endless, deterministic stream of prompts over a JSONL file.

    Each line is an object with the prompt under `input_key` and, where there is one, a label under `label_key` and an
    object under `metadata_key`. Blank lines are skipped. With `apply_chat_template` the prompt is a string (one user
    message) or a list of {role, content} messages; the rendered text brings its own special tokens. Without it the
    prompt is a string, and the tokenizer adds special tokens only if `add_special_tokens` is set.

    Opening reads the file once: every line is checked, its byte offset and token ids are kept in flat arrays, the text
    stays on disk. Epoch e visits every row exactly once, in the order `random.Random(seed + e)` shuffles them (file
    order without `shuffle`).

    Args:
        tokenizer: a Hugging Face tokenizer.
        max_prompt_len: longest prompt allowed, in tokens.
        overlong: what a longer prompt does: "refuse" raises, "drop" leaves it out and counts it in `num_dropped`.

    Raises:
        ValueError: `path:line` and what was expected; an empty file; a key that no row has; no chat template.
        FileNotFoundError: no such file.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        tokenizer: Any,
        input_key: str = "prompt",
        label_key: str = "label",
        metadata_key: str = "metadata",
        apply_chat_template: bool = False,
        add_special_tokens: bool = False,
        max_prompt_len: int | None = None,
        overlong: Literal["refuse", "drop"] = "refuse",
        shuffle: bool = True,
        seed: int = 42,
    ) -> None:
        self.path = Path(path)
        self._keys = (input_key, label_key, metadata_key)
        self._template: Callable[..., str] | None = None
        if apply_chat_template:
            if not tokenizer.chat_template:
                raise ValueError(f"apply_chat_template: the tokenizer of {tokenizer.name_or_path!r} has no template")
            self._template = tokenizer.apply_chat_template
        self._shuffle = shuffle
        self._seed = seed
        self._line_numbers = array("Q")
        self._line_offsets = array("Q")
        self._line_digests = array("Q")
        self._tokens = array("I")
        self._token_ends = array("Q", [0])
        self.num_dropped = 0
        self._read_file(
            tokenizer=tokenizer,
            add_special_tokens=add_special_tokens and not apply_chat_template,
            max_prompt_len=max_prompt_len,
            overlong=overlong,
        )
        self._epoch = 0
        self._offset = 0
        self._order = self._epoch_order(0)

    def _read_file(
        self, *, tokenizer: Any, add_special_tokens: bool, max_prompt_len: int | None, overlong: str
    ) -> None:
        if not self.path.is_file():
            raise FileNotFoundError(f"prompt data {self.path}: no such file")
        seen_keys: set[str] = set()
        pending: list[tuple[int, int, int, str]] = []

        def flush() -> None:
            if not pending:
                return
            encoded = tokenizer([text for *_, text in pending], add_special_tokens=add_special_tokens)["input_ids"]
            for (number, offset, line_digest, _), ids in zip(pending, encoded, strict=True):
                if not ids:
                    raise ValueError(f"{self.path}:{number}: the prompt has no tokens")
                if max_prompt_len is not None and len(ids) > max_prompt_len:
                    if overlong == "refuse":
                        raise ValueError(
                            f"{self.path}:{number}: the prompt has {len(ids)} tokens, at most {max_prompt_len} are"
                            " allowed (rollout_max_prompt_len)"
                        )
                    self.num_dropped += 1
                    continue
                self._line_numbers.append(number)
                self._line_offsets.append(offset)
                self._line_digests.append(line_digest)
                self._tokens.extend(ids)
                self._token_ends.append(len(self._tokens))
            pending.clear()

        digest = hashlib.sha256()
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                digest.update(line)
                if line.strip():
                    row = self._parse(line, number)
                    seen_keys.update(row)
                    pending.append((number, offset, _digest64(line), self._render(row, number)))
                    if len(pending) == _TOKENIZE_ROWS:
                        flush()
                offset += len(line)
        flush()
        self.sha256 = digest.hexdigest()
        if not self._line_numbers:
            dropped = f" ({self.num_dropped} were longer than {max_prompt_len} tokens)" if self.num_dropped else ""
            raise ValueError(f"prompt data {self.path}: no prompts{dropped}")
        for key, default in zip(self._keys[1:], ("label", "metadata"), strict=True):
            if key != default and key not in seen_keys:
                raise ValueError(f"prompt data {self.path}: no row has the key {key!r}")

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        input_key, _, metadata_key = self._keys
        return _parse_row(
            line,
            where=f"{self.path}:{number}",
            input_key=input_key,
            metadata_key=metadata_key,
            messages_allowed=self._template is not None,
        )

    def _render(self, row: dict[str, Any], number: int) -> str:
        prompt = row[self._keys[0]]
        if self._template is None:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            text = self._template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            # A template is the model's own program, and may refuse an order of roles.
            raise ValueError(f"{self.path}:{number}: the chat template: {type(error).__name__}: {error}") from error
        for message in messages:
            if isinstance(content := message.get("content"), list) and str(content) in text:
                raise ValueError(
                    f"{self.path}:{number}: the chat template does not know content in parts: it writes {content}"
                )
        return text

    def __len__(self) -> int:
        return len(self._line_numbers)

    def __getitem__(self, index: int) -> PromptRow:
        """Row `index` in file order. Raises IndexError outside 0..len-1, ValueError if the file changed meanwhile."""
        if not 0 <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        number = self._line_numbers[index]
        with self.path.open("rb") as file:
            file.seek(self._line_offsets[index])
            line = file.readline()
        if _digest64(line) != self._line_digests[index]:
            raise ValueError(f"{self.path}:{number}: changed since the run began: its tokens are those of before")
        row = self._parse(line, number)
        _, label_key, metadata_key = self._keys
        return PromptRow(
            index=index,
            prompt=self._render(row, number),
            tokens=self._tokens[self._token_ends[index] : self._token_ends[index + 1]].tolist(),
            label=row.get(label_key),
            metadata=row.get(metadata_key) or {},
        )

    def get(self, n: int) -> list[tuple[int, PromptRow]]:
        """The next `n` prompts as (prompt index, row), running on into as many new epochs as it takes."""
        if n < 1:
            raise ValueError(f"number of prompts must be at least 1, got {n}")
        rows: list[tuple[int, PromptRow]] = []
        while len(rows) < n:
            if self._offset == len(self):
                self._epoch += 1
                self._offset = 0
                self._order = self._epoch_order(self._epoch)
            taken = self._order[self._offset : self._offset + n - len(rows)]
            rows.extend((index, self[index]) for index in taken)
            self._offset += len(taken)
        return rows

    def _epoch_order(self, epoch: int) -> list[int]:
        order = list(range(len(self)))
        if self._shuffle:
            random.Random(self._seed + epoch).shuffle(order)
        return order

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream plus what it depends on; JSON-safe. O(1) in size."""
        return {
            "sha256": self.sha256,
            "num_prompts": len(self),
            "shuffle": self._shuffle,
            "seed": self._seed,
            "epoch": self._epoch,
            "offset": self._offset,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken.

        Raises:
            ValueError: the data, the filter on length, the seed or the shuffling is not what it was.
        """
        now = self.state_dict()
        for name in ("sha256", "num_prompts", "shuffle", "seed"):
            if state[name] != now[name]:
                raise ValueError(
                    f"prompt data {self.path} cannot be resumed: {name} was {state[name]!r}, is now {now[name]!r}"
                )
        self._epoch = int(state["epoch"])
        self._offset = int(state["offset"])
        self._order = self._epoch_order(self._epoch)
