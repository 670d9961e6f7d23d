"""Offline value pretraining: manifest, dataset, deterministic batches, checkpoint contract (formulas A1 to A5).

    manifest = load_value_pretrain_manifest(path, expected_sha256=None)
    dataset = ValuePretrainDataset(manifest.train, manifest.objective)
    for indices in dataset.batch_indices(global_batch_size=g, epochs=e, seed=s): ...
    path, sha256 = write_value_pretrain_contract(folder, manifest=manifest, completed_steps=n, model_identity=name,
                                                 seed=s, global_batch_size=g)
    contract = load_value_pretrain_contract(folder, expected_sha256=None)     # a dict

`prepare_value_pretraining(args, ...)` is everything `train_value.py` refuses before a device is reserved.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.config.groups import flag_of
from miles.contracts.artifact import CHECKPOINT_MANIFEST_NAME, check_checkpoint_listing
from miles.contracts.canonical import require_int, sha256_file
from miles.contracts.chain import (
    LINK_FOLDER_NAME,
    iteration_folder,
    prune_link_records,
    read_link_record,
    write_link_record,
)
from miles.contracts.publish import publish_bytes
from miles.contracts.value_report import parse_report
from miles.contracts.value_schema import (
    VALUE_PRETRAIN_CONTRACT_NAME,
    VALUE_PRETRAIN_CONTRACT_SCHEMA,
    VALUE_PRETRAIN_SCHEMA,
    ValueDatasetSpec,
    ValueObjective,
    ValuePretrainManifest,
    batch_plan,
    contract_bytes,
    contract_path,
    contract_sha256,
    load_value_pretrain_contract,
    load_value_pretrain_manifest,
    require_input,
)
from miles.data import value_sample
from miles.data.value_sample import ValueSample, parse_value_row
from miles.data.value_scan import digest64
from miles.value_evaluation import refuse_existing_report, select_mixed_label_batches

if TYPE_CHECKING:
    from miles.data.value_index import ValueIndex

logger = logging.getLogger(__name__)

__all__ = [
    "VALUE_PRETRAIN_CONTRACT_NAME",
    "VALUE_PRETRAIN_CONTRACT_SCHEMA",
    "VALUE_PRETRAIN_SCHEMA",
    "ResumePoint",
    "ValueDatasetSpec",
    "ValueObjective",
    "ValuePretrainDataset",
    "ValuePretrainManifest",
    "ValuePretrainPlan",
    "ValueSample",
    "check_loaded_iterations",
    "check_online_contract",
    "check_parallel_layout",
    "check_some_token_ids",
    "check_token_budget",
    "check_token_ids",
    "contract_sha256",
    "load_and_check_resume",
    "load_value_pretrain_contract",
    "load_value_pretrain_manifest",
    "objective_args",
    "parse_value_row",
    "prepare_value_pretraining",
    "refuse_canary_over_contract",
    "refuse_start_over_contract",
    "value_pretrain_num_steps",
    "write_value_pretrain_contract",
]


class ValuePretrainDataset:
    """The rows of one split, verified when opened and again whenever one is read (formulas A3).

    Opening reads the file once: it is hashed and every row validated in the same pass, on all cores where it is large
    (`miles.data.value_scan`). Afterwards 24 bytes a row are held, never the rows. The index of a large file is cached
    (`miles.data.value_index`): the next opening hashes the bytes and parses none.

    Attributes:
        spec: the split of the manifest it was opened from (`path`, `sha256`, `num_samples`).
        objective: the manifest's objective.
        max_tokens: number of tokens of the longest row.

    Raises:
        FileNotFoundError: the data file does not exist.
        ValueError: a row is bad (the message begins with `path:line`), two rows share a sample_id, the SHA-256 or the
            number of rows differs from the manifest, or the file changed while it was read.
    """

    def __init__(self, spec: ValueDatasetSpec, objective: ValueObjective) -> None:
        self.spec = spec
        self.objective = objective
        require_input(spec.path, what="value-pretraining dataset")
        self._index = self._open_and_verify()
        self.max_tokens = self._index.max_tokens

    def __len__(self) -> int:
        return len(self._index)

    def _open_and_verify(self) -> ValueIndex:
        # It imports numpy, which a command line that is refused need not wait for.
        from miles.data import value_index

        path, expected = self.spec.path, self.spec.sha256
        opened = value_index.open_index(path, sha256=expected, objective=self.objective)
        if opened.changed:
            raise ValueError(f"dataset changed while it was read: {path}")
        if opened.sha256 != expected:
            # A file that is not the manifest's is told so before its rows are.
            raise ValueError(
                f"dataset SHA-256 mismatch for {path}: expected {expected}, got {opened.sha256}{self._crlf_hint()}"
            )
        self._index = opened.index
        if opened.bad_row is not None:
            self._read_line(opened.bad_row, location=f"{path}:{self._line_number(opened.bad_row)}")
            raise ValueError(f"dataset changed while it was read: {path}")
        self._refuse_duplicate_ids(opened.suspects)
        if len(opened.index) != self.spec.num_samples:
            raise ValueError(
                f"dataset row-count mismatch for {path}: expected {self.spec.num_samples}, got {len(opened.index)}"
            )
        if not opened.cached and path.stat().st_size >= value_index.CACHE_FROM_BYTES:
            value_index.write_cache(opened.index, path, sha256=expected, objective=self.objective)
        return opened.index

    def _crlf_hint(self) -> str:
        with self.spec.path.open("rb") as stream:
            return ", its lines end in CRLF: was it converted?" if stream.readline(1 << 20).endswith(b"\r\n") else ""

    def _refuse_duplicate_ids(self, suspects: Sequence[int]) -> None:
        first: dict[str, int] = {}
        for row in suspects:
            sample_id = self.get(row).sample_id
            if sample_id in first:
                raise ValueError(
                    f"{self.location(row)}: duplicate sample_id {sample_id!r}, first at line "
                    f"{self._line_number(self._offset(first[sample_id]))}"
                )
            first[sample_id] = row

    def _offset(self, row: int) -> int:
        return int(self._index.offsets[row])

    def _read_line(self, offset: int, *, location: str) -> ValueSample:
        with self.spec.path.open("rb") as stream:
            stream.seek(offset)
            return parse_value_row(
                stream.readline(value_sample.MAX_ROW_BYTES + 1), objective=self.objective, location=location
            )

    def _line_number(self, offset: int) -> int:
        # Counted only for a message: blank lines make it differ from the row number.
        left, lines = offset, 1
        with self.spec.path.open("rb") as stream:
            while left > 0 and (chunk := stream.read(min(left, 1 << 20))):
                left -= len(chunk)
                lines += chunk.count(b"\n")
        return lines

    def location(self, row: int) -> str:
        """Return `path:line` of a row."""
        return f"{self.spec.path}:{self._line_number(self._offset(row))}"

    def get(self, index: int) -> ValueSample:
        """Read row `index` again, verified against the bytes seen when the dataset was opened.

        Raises:
            IndexError: `index` is a bool, no int, negative, or not below the number of rows.
            ValueError: the row's bytes changed since the dataset was opened.
        """
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self):
            raise IndexError(f"row {index!r} is outside 0..{len(self) - 1} of {self.spec.path}")
        return self._read([index])[0]

    def _read(self, indices: Sequence[int]) -> list[ValueSample]:
        samples = []
        with self.spec.path.open("rb") as stream:
            for index in indices:
                stream.seek(self._offset(index))
                line = stream.readline(value_sample.MAX_ROW_BYTES + 1)
                if digest64(line) != int(self._index.digests[index]):
                    raise ValueError(f"dataset changed since it was opened: row {index} of {self.spec.path}")
                samples.append(
                    parse_value_row(line, objective=self.objective, location=f"{self.spec.path} row {index}")
                )
        return samples

    def scalar_active_labels(self) -> Iterator[float]:
        """Yield each row's one return at its active tokens, from the index; NaN for a row that has several."""
        return map(float, self._index.labels)

    def batch_indices(self, *, global_batch_size: int, epochs: int, seed: int) -> Iterator[tuple[int, ...]]:
        """Yield the deterministic batch plan: one tuple of row indices per optimizer step (formulas A3.1).

        Each epoch e shuffles all rows by `random.Random(seed + e)` and drops the rows that fill no whole batch.

        Raises:
            ValueError: at the call, if there is not one complete global batch.
        """
        require_int(seed, field="seed")
        value_pretrain_num_steps(num_samples=len(self), global_batch_size=global_batch_size, epochs=epochs)
        return self._batches(global_batch_size, epochs, seed)

    def _batches(self, global_batch_size: int, epochs: int, seed: int) -> Iterator[tuple[int, ...]]:
        for epoch in range(epochs):
            # Eight bytes a row; a list of a million integers takes forty.
            rows = array("q", range(len(self)))
            random.Random(seed + epoch).shuffle(rows)
            for start in range(0, len(rows) - global_batch_size + 1, global_batch_size):
                yield tuple(rows[start : start + global_batch_size])

    def build_rollout_batch(self, indices: Sequence[int]) -> dict[str, list[Any]]:
        """Read rows into the column batch the trainer takes: one list per column, one entry per row.

        Returns:
            tokens, response_lengths, returns, loss_masks, sample_indices, sample_ids.

        Raises:
            IndexError, ValueError: as `get`.
        """
        for index in indices:
            if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(self):
                raise IndexError(f"row {index!r} is outside 0..{len(self) - 1} of {self.spec.path}")
        samples = self._read(indices)
        return {
            "tokens": [list(sample.tokens) for sample in samples],
            "response_lengths": [sample.response_length for sample in samples],
            "returns": [list(sample.returns) for sample in samples],
            "loss_masks": [list(sample.loss_mask) for sample in samples],
            "sample_indices": list(indices),
            "sample_ids": [sample.sample_id for sample in samples],
        }


def value_pretrain_num_steps(*, num_samples: int, global_batch_size: int, epochs: int) -> int:
    """Return the number of optimizer steps of the batch plan, (N // g) * E.

    Raises:
        ValueError: an argument is not a positive int, or there is not one complete global batch.
    """
    require_int(num_samples, field="num_samples", minimum=1)
    require_int(global_batch_size, field="global_batch_size", minimum=1)
    require_int(epochs, field="epochs", minimum=1)
    if num_samples < global_batch_size:
        raise ValueError(
            "value pretraining requires at least one complete global batch: "
            f"{num_samples} rows for global_batch_size={global_batch_size}"
        )
    return num_samples // global_batch_size * epochs


def write_value_pretrain_contract(
    checkpoint: str | os.PathLike[str],
    *,
    manifest: ValuePretrainManifest,
    completed_steps: int,
    model_identity: str,
    seed: int,
    global_batch_size: int,
) -> tuple[Path, str]:
    """Publish the contract of a critic folder, after the checkpoint it speaks of was saved (formulas A4).

    A link record, which binds the contract to its manifest's path and to the checkpoint's manifest, is published
    first; killed in between, the earlier contract stands.

    Returns:
        The contract's path and the SHA-256 of its canonical bytes.

    Raises:
        ValueError: a field breaks a rule of A4.
    """
    data = contract_bytes(
        {
            "schema": VALUE_PRETRAIN_CONTRACT_SCHEMA,
            "source_manifest_sha256": manifest.sha256,
            "train_dataset_sha256": manifest.train.sha256,
            "objective": manifest.objective.to_dict(),
            "batch_plan": batch_plan(seed=seed, global_batch_size=global_batch_size),
            "completed_steps": completed_steps,
            "model_identity": model_identity,
        }
    )
    folder = Path(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / VALUE_PRETRAIN_CONTRACT_NAME
    write_link_record(folder, contract=data, completed_steps=completed_steps, manifest_path=manifest.path)
    publish_bytes(path, data, temporary_name=f".{VALUE_PRETRAIN_CONTRACT_NAME}.tmp")
    prune_link_records(folder, contract=data)
    return path, hashlib.sha256(data).hexdigest()


def objective_args(objective: ValueObjective) -> dict[str, Any]:
    """Return the trainer arguments an objective sets, for `args.replace(source=..., **objective_args(objective))`."""
    return {
        "value_loss_type": objective.loss_type,
        "value_num_bins": objective.num_bins,
        "value_reward_range": [objective.reward_low, objective.reward_high],
        "value_target_type": objective.target_type,
        "hl_gauss_sigma_ratio": objective.hl_gauss_sigma_ratio,
    }


@dataclass(frozen=True)
class ResumePoint:
    """The contract of `--critic-load` and the digest of its bytes."""

    contract: dict[str, Any]
    sha256: str

    @property
    def completed_steps(self) -> int:
        return self.contract["completed_steps"]


def load_and_check_resume(
    critic_load: str | os.PathLike[str] | None,
    *,
    manifest: ValuePretrainManifest,
    seed: int,
    global_batch_size: int,
    eval_only: bool = False,
    expected_sha256: str | None = None,
) -> ResumePoint | None:
    """Load the contract in `--critic-load`, if there is one, and refuse one that differs from this run.

    Args:
        critic_load: critic folder, or None.
        eval_only: evaluation needs a contract, applies the digest pin, and leaves the batch plan free.
        expected_sha256: `--critic-value-pretrain-contract-sha256`; training warns where it differs.

    Returns:
        The resume point, or None for a fresh critic.

    Raises:
        ValueError: manifest, train data, objective or (in training) batch plan differ, or evaluation has no contract.
    """
    if critic_load is None or not contract_path(critic_load).is_file():
        if eval_only:
            raise ValueError(
                f"critic evaluation requires a contracted value checkpoint: no {VALUE_PRETRAIN_CONTRACT_NAME} "
                f"in --critic-load {critic_load}"
            )
        return None
    contract = load_value_pretrain_contract(critic_load, expected_sha256 if eval_only else None)
    for field, words, expected in (
        ("source_manifest_sha256", "was trained from a different value-pretraining manifest", manifest.sha256),
        ("train_dataset_sha256", "was trained from a different value-pretraining dataset", manifest.train.sha256),
        ("objective", "used a different value objective", manifest.objective.to_dict()),
        (
            "batch_plan",
            "used a different deterministic batch plan",
            # Evaluation draws its own batches.
            contract["batch_plan"] if eval_only else batch_plan(seed=seed, global_batch_size=global_batch_size),
        ),
    ):
        if contract[field] != expected:
            raise ValueError(
                f"critic resume checkpoint {words}: {field} is {contract[field]} in {contract_path(critic_load)}, "
                f"this run has {expected}"
            )
    digest = hashlib.sha256(contract_bytes(contract)).hexdigest()
    if expected_sha256 not in (None, digest):
        # Every save publishes a newer contract, so a command line that is started again cannot name it.
        logger.warning(
            "%s has SHA-256 %s, not the pinned %s: training goes on",
            contract_path(critic_load),
            digest,
            expected_sha256,
        )
    return ResumePoint(contract, digest)


def refuse_canary_over_contract(critic_save: str | os.PathLike[str]) -> None:
    """Refuse a one-step canary whose output folder already holds a production contract, be it a dangling link."""
    path = contract_path(critic_save)
    if os.path.lexists(path):
        raise ValueError(f"one-step value-pretraining canary output already contains a production contract: {path}")


def refuse_start_over_contract(
    critic_save: str | os.PathLike[str], *, critic_load: str | os.PathLike[str] | None
) -> None:
    """Refuse to train anything else into a folder that holds a contracted critic than that critic itself."""
    path = contract_path(critic_save)
    same = critic_load is not None and Path(critic_load).resolve() == Path(critic_save).resolve()
    if os.path.lexists(path) and not same:
        raise ValueError(
            f"--critic-save {critic_save} already holds a critic with a contract, which would be overwritten: "
            f"continue it with --critic-load {critic_save}, or name another folder"
        )


def check_parallel_layout(
    *,
    total_devices: int,
    model_parallel_size: int,
    global_batch_size: int,
    micro_batch_size: int,
    use_dynamic_batch_size: bool,
) -> int:
    """Return the critic's data-parallel size.

    Raises:
        ValueError: devices, global batch or local batch do not divide.
    """
    if total_devices % model_parallel_size != 0:
        raise ValueError(
            f"critic device count {total_devices} is not divisible by model-parallel size {model_parallel_size}"
        )
    dp_size = total_devices // model_parallel_size
    if global_batch_size % dp_size != 0:
        raise ValueError(f"global_batch_size={global_batch_size} must be divisible by critic DP size {dp_size}")
    local = global_batch_size // dp_size
    if not use_dynamic_batch_size and local % micro_batch_size != 0:
        raise ValueError(f"local critic batch size {local} must be divisible by micro_batch_size={micro_batch_size}")
    return dp_size


@dataclass(frozen=True)
class ValuePretrainPlan:
    """What `train_value.py` knows before it reserves a device."""

    manifest: ValuePretrainManifest
    dataset: ValuePretrainDataset
    resume: ResumePoint | None
    dp_size: int
    num_steps: int
    eval_batches: tuple[tuple[int, ...], ...] | None

    @property
    def resume_after(self) -> int:
        return 0 if self.resume is None else self.resume.completed_steps

    def data_record(self) -> dict[str, Any]:
        """Return what run.json says of the data: paths with links resolved, digests, numbers of rows."""
        splits = {"train": self.manifest.train, "heldout": self.manifest.heldout}
        return {
            "manifest": {"path": str(self.manifest.path), "sha256": self.manifest.sha256},
            **{
                name: {"path": str(spec.path), "sha256": spec.sha256, "num_samples": spec.num_samples}
                for name, spec in splits.items()
                if spec is not None
            },
        }


def prepare_value_pretraining(args: Any, *, model_parallel_size: int) -> ValuePretrainPlan:
    """Do all of `train_value.py` that can be refused before a device is reserved; what costs least comes first.

    Args:
        args: the parsed arguments.
        model_parallel_size: devices that hold one copy of the critic.

    Raises:
        ValueError, FileNotFoundError: one line that names the flag, file, row or field.
    """
    if args.value_pretrain_manifest is None:
        raise ValueError("train_value.py requires --value-pretrain-manifest")
    if args.train_backend != "megatron":
        raise ValueError(
            "offline value pretraining currently requires --train-backend megatron, "
            f"got --train-backend {args.train_backend}"
        )
    eval_only = bool(args.value_pretrain_eval_only)
    if not eval_only and args.critic_save is None:
        raise ValueError("value pretraining requires --critic-save, the folder for the critic and its contract")
    if args.value_pretrain_canary_one_step and not eval_only:
        refuse_canary_over_contract(args.critic_save)
    elif not eval_only:
        refuse_start_over_contract(args.critic_save, critic_load=args.critic_load)
    if eval_only:
        for flag, value in (
            ("--value-pretrain-eval-report", args.value_pretrain_eval_report),
            ("--value-pretrain-eval-num-batches", args.value_pretrain_eval_num_batches),
        ):
            if value is None:
                raise ValueError(f"--value-pretrain-eval-only requires {flag}")
        refuse_existing_report(args.value_pretrain_eval_report)
    manifest = load_value_pretrain_manifest(args.value_pretrain_manifest, args.value_pretrain_manifest_sha256)
    # Training always reads the train split; the split flag is about evaluation.
    spec = manifest.heldout if eval_only and args.value_pretrain_eval_split == "heldout" else manifest.train
    if spec is None:
        raise ValueError(f"value-pretraining manifest has no heldout split: {manifest.path}")
    resume = load_and_check_resume(
        args.critic_load,
        manifest=manifest,
        seed=args.seed,
        global_batch_size=args.global_batch_size,
        eval_only=eval_only,
        expected_sha256=args.critic_value_pretrain_contract_sha256,
    )
    dp_size = check_parallel_layout(
        total_devices=args.critic_num_nodes * args.critic_num_gpus_per_node,
        model_parallel_size=model_parallel_size,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        use_dynamic_batch_size=args.use_dynamic_batch_size,
    )
    num_steps = value_pretrain_num_steps(
        num_samples=manifest.train.num_samples,
        global_batch_size=args.global_batch_size,
        epochs=args.value_pretrain_epochs,
    )
    if not eval_only and resume is not None and resume.completed_steps > num_steps:
        raise ValueError(f"critic checkpoint step {resume.completed_steps} exceeds the {num_steps}-step batch plan")
    if not eval_only and resume is not None and resume.completed_steps == num_steps:
        raise ValueError(
            f"no step is left: the checkpoint already holds all {num_steps} steps of the batch plan; "
            "more --value-pretrain-epochs continue it"
        )
    dataset = ValuePretrainDataset(spec, manifest.objective)
    batches = None
    if eval_only:
        batches = select_mixed_label_batches(
            dataset,
            global_batch_size=args.global_batch_size,
            num_batches=args.value_pretrain_eval_num_batches,
            seed=args.seed,
        )
    return ValuePretrainPlan(manifest, dataset, resume, dp_size, num_steps, batches)


def check_token_budget(dataset: ValuePretrainDataset, args: Any) -> None:
    """Raise ValueError where a micro-batch, if it is filled by tokens, cannot hold the longest row."""
    if not args.use_dynamic_batch_size:
        return
    ranks = args.context_parallel_size
    if dataset.max_tokens > args.max_tokens_per_gpu * ranks:
        room = f"--max-tokens-per-gpu {args.max_tokens_per_gpu}" + (
            f" on {ranks} context-parallel ranks" * (ranks > 1)
        )
        raise ValueError(f"{room} cannot hold the longest row of {dataset.spec.path}, of {dataset.max_tokens} tokens")


_LOOKED_AT = 256


def check_some_token_ids(dataset: ValuePretrainDataset, *, vocab_size: int, model: str) -> None:
    """Look at rows spread over the data set, enough to tell another tokenizer's tokens; `check_token_ids` sees all.

    Raises:
        ValueError: as `check_token_ids`.
    """
    step = max(1, len(dataset) // _LOOKED_AT)
    rows = range(0, len(dataset), step)[:_LOOKED_AT]
    check_token_ids(dataset, dataset.build_rollout_batch(rows), vocab_size=vocab_size, model=model)


def check_token_ids(dataset: ValuePretrainDataset, batch: Mapping[str, Any], *, vocab_size: int, model: str) -> None:
    """Check that the model has an embedding for every token of a batch of `dataset.build_rollout_batch`.

    Raises:
        ValueError: it has not; names file and line.
    """
    for row, sample_id, tokens in zip(batch["sample_indices"], batch["sample_ids"], batch["tokens"], strict=True):
        if (highest := max(tokens)) >= vocab_size:
            raise ValueError(
                f"{dataset.location(row)}: sample {sample_id!r} has token id {highest}, the model {model} has "
                f"vocab_size {vocab_size}: was the data made with another tokenizer?"
            )


def check_loaded_iterations(loaded: Sequence[int | None], *, resume: ResumePoint | None) -> int:
    """Return the one iteration all ranks loaded, which the contract must name; without a contract it must be 0.

    Args:
        loaded: what the critic group's `init` returned, None where a rank has none.

    Raises:
        RuntimeError: no rank, or two ranks that disagree.
        ValueError: the iteration is not the contract's, or is above 0 without a contract.
    """
    present = sorted({value for value in loaded if value is not None})
    if len(present) != 1:
        raise RuntimeError(f"critic ranks disagree about the loaded checkpoint iteration: {list(loaded)}")
    iteration = present[0]
    if resume is not None and iteration != resume.completed_steps:
        raise ValueError(
            f"critic checkpoint iteration {iteration} disagrees with contract step {resume.completed_steps}"
        )
    if resume is None and iteration != 0:
        raise ValueError(
            f"critic checkpoint iteration {iteration} without a value-pretraining contract is ambiguous; "
            "start from an actor checkpoint or model folder, or resume from a contracted critic"
        )
    return iteration


def check_online_contract(
    critic_load: str | os.PathLike[str],
    *,
    expected_sha256: str | None = None,
    expected_model_identity: str | None = None,
    stated: Mapping[str, Any] | None = None,
) -> tuple[ValueObjective, ResumePoint]:
    """Load the contract of the critic that online training consumes (formulas A10).

    Args:
        expected_sha256: `--critic-value-pretrain-contract-sha256`.
        expected_model_identity: refuse a critic pretrained from another model; None does not compare.
        stated: value-head arguments the user set by hand (names of `objective_args`); each must agree.

    Returns:
        The objective to restore, and the contract.

    Raises:
        FileNotFoundError: the folder holds no contract.
        ValueError: the digest does not match, or a field disagrees; the message names it.
    """
    contract = load_value_pretrain_contract(critic_load, expected_sha256)
    where = contract_path(critic_load)
    if expected_model_identity is not None and contract["model_identity"] != expected_model_identity:
        raise ValueError(
            f"critic contract does not match the run: model_identity is {contract['model_identity']!r} in {where}, "
            f"the run has {expected_model_identity!r}; a contract names its model by path: pass it as it stands there"
        )
    objective = ValueObjective.from_dict(contract["objective"])
    restored = objective_args(objective)
    for name, value in (stated or {}).items():
        actual = list(value) if isinstance(value, tuple) else value
        if restored[name] != actual:
            raise ValueError(
                f"critic contract does not match the run: {flag_of(name)} is {actual!r}, "
                f"{where} has {restored[name]!r}"
            )
    return objective, ResumePoint(contract, contract_sha256(critic_load))


def check_passed_report(path: str, *, contract_digest: str) -> None:
    """Raise ValueError unless the evaluation report at `path` passed its gate for the critic of that contract."""
    try:
        report = parse_report(Path(path).read_bytes())
    except (ValueError, OSError) as error:
        raise ValueError(f"--critic-value-eval-report {path}: {error}") from None
    split = report["manifest"]["split"]
    if split != "heldout":
        raise ValueError(
            f"--critic-value-eval-report {path}: speaks of the {split} split, "
            "a critic passes its gate on held-out rows"
        )
    if not report["passed"]:
        raise ValueError(f"--critic-value-eval-report {path}: this critic did not pass its gate")
    if report["checkpoint"]["contract_sha256"] != contract_digest:
        raise ValueError(
            f"--critic-value-eval-report {path}: checkpoint.contract_sha256 is "
            f"{report['checkpoint']['contract_sha256']}, the contract of --critic-load is {contract_digest}"
        )


def check_critic_listing(critic_load: str | os.PathLike[str], resume: ResumePoint) -> None:
    """Check names and sizes of the checkpoint that a contract speaks of; the ranks that load it check the digests.

    Raises:
        ValueError: a file is missing, truncated or too many; names it.
    """
    try:
        check_checkpoint_listing(iteration_folder(critic_load, resume.completed_steps))
    except (ValueError, OSError) as error:
        raise ValueError(f"--critic-load {critic_load}: {error}") from None


def check_published_together(critic_load: str | os.PathLike[str], resume: ResumePoint) -> None:
    """Check that a contract and its checkpoint are those of one publication, by the link record.

    A folder without any record, which another program may have made, is warned of.

    Raises:
        ValueError: contract or checkpoint is another than was published, or a later contract was.
    """
    folder = Path(critic_load)
    if not (folder / LINK_FOLDER_NAME).is_dir():
        logger.warning("--critic-load %s: has no %s: nothing ties it to its contract", folder, LINK_FOLDER_NAME)
        return
    checkpoint = iteration_folder(folder, resume.completed_steps)
    try:
        record = read_link_record(folder, resume.sha256, resume.completed_steps)
        if sha256_file(checkpoint / CHECKPOINT_MANIFEST_NAME) != record["checkpoint_manifest_sha256"]:
            raise ValueError(f"{checkpoint.name}/{CHECKPOINT_MANIFEST_NAME} is not the contract's checkpoint's")
    except (ValueError, OSError) as error:
        raise ValueError(f"--critic-load {critic_load}: {error}") from None
