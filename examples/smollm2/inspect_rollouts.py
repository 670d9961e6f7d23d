"""Stage 4: what the model answered, before anything is learnt from it.

SmolLM2 pads with its end-of-turn token, so code that masks by pad id would drop the token which ends an answer. Here
every finished response must end with it, once, and train on it. And a critic needs rewards that differ.
"""

import json
from collections import Counter
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from miles.data.sample import Sample, SampleStatus
from miles.reporting.wilson import wilson_interval
from miles.utils.strict_parser import StrictParser


def check_end(sample: Sample, *, eos: int) -> None:
    """Check where the end-of-turn token stands in a response and in its loss mask.

    Raises:
        ValueError: a finished response does not end with it, any response holds it before its end, or it is masked.
    """
    tokens, finished = sample.response_tokens, sample.status is SampleStatus.COMPLETED
    if finished and tokens[-1] != eos:
        raise ValueError(f"sample {sample.index} finished with token {tokens[-1]}, expected {eos}")
    if eos in tokens[:-1] or (tokens[-1] == eos and not finished):
        raise ValueError(f"sample {sample.index} goes on after the end-of-turn token {eos}")
    if len(sample.loss_mask) != len(tokens) or not all(sample.loss_mask):
        raise ValueError(f"sample {sample.index}: not all {len(tokens)} response tokens are trainable")


def check_prompt(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the prompt went in as the chat template renders it, special tokens as single ids.

    Raises:
        ValueError: it does not start with a turn, or does not end where the assistant's begins.
    """
    prompt = sample.tokens[: sample.prompt_length]
    opening = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    if prompt[0] != tokenizer.bos_token_id or prompt[-len(opening) :] != opening:
        raise ValueError(f"sample {sample.index}: its prompt is not what the chat template renders: {sample.prompt!r}")


def main() -> None:
    parser = StrictParser(description=__doc__)
    parser.add_argument("--rollouts", type=Path, required=True, help="run folder of `train.py --rollout-only`")
    parser.add_argument("--model", type=Path, required=True, help="model folder, for its tokenizer")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    files = sorted((options.rollouts / "rollouts").glob("rollout_*.jsonl"))
    samples = [Sample.from_dict(json.loads(line)) for file in files for line in file.read_text().splitlines()]
    try:
        for sample in samples:
            check_prompt(sample, tokenizer)
            check_end(sample, eos=tokenizer.eos_token_id)
    except ValueError as error:
        raise SystemExit(f"inspect_rollouts.py: {error}") from None
    ended = sum(sample.status is SampleStatus.COMPLETED for sample in samples)
    right = sum(sample.reward == 1.0 for sample in samples)
    low, high = wilson_interval(right, len(samples))
    print(
        f"{ended} of {len(samples)} responses end with {tokenizer.eos_token!r} (id {tokenizer.eos_token_id}, the pad "
        "token too), all of them trainable; the others reached the length limit"
    )
    print(f"right: {right} of {len(samples)}, {right / len(samples):.1%} (95 % interval {low:.1%} to {high:.1%})")
    rewards = Counter(sample.reward for sample in samples)
    print("rewards: " + ", ".join(f"{reward:g}: {count}" for reward, count in sorted(rewards.items())))
    if len(rewards) < 2:
        raise SystemExit("inspect_rollouts.py: all rewards are equal; a critic cannot learn from them")
    shown = min(samples, key=lambda sample: (sample.reward != 1.0, sample.response_length))
    print(f"for example (reward {shown.reward:g}):\n{tokenizer.decode(shown.tokens)}")


if __name__ == "__main__":
    main()
