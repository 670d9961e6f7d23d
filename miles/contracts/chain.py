"""The chain: manifest -> data -> contract -> checkpoint files -> evaluation report -> the run that consumed them.

Each artifact pins the one before it by SHA-256, so walking back from any of them finds all of them:

    run.json  --sha-->  contract, evaluation report, config.yaml, the run's own checkpoints
    report    --sha-->  manifest, contract, checkpoint manifest
    contract  --sha-->  manifest, train data;  its link record  --sha-->  checkpoint manifest
    manifest  --sha-->  train data, held-out data
    checkpoint manifest  --size, sha-->  every file of the checkpoint

Nothing pins run.json, the last link: its seal finds a change, not a forgery. Metrics, rollouts and logs of a run are
its account, not links, and superseded checkpoints are no longer spoken of: `unchecked_checkpoints` names them.

A link record (`value_pretrain_links/<contract sha256>.json` beside the contract) holds what the contract's fixed
format has no room for: where the manifest lies and which checkpoint bytes the contract speaks of.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from miles.contracts.artifact import (
    CHECKPOINT_MANIFEST_NAME,
    CHECKPOINT_MANIFEST_SCHEMA,
    check_checkpoint_digests,
    check_checkpoint_listing,
    checkpoint_files,
    in_parallel,
    read_checkpoint_manifest,
)
from miles.contracts.canonical import (
    CHUNK_BYTES,
    StrictJsonError,
    canonical_json_bytes,
    check_seal,
    error_text,
    parse_strict_json,
    readable_json_bytes,
    real_path,
    require_file,
    require_int,
    require_sha256,
    require_text,
    sealed,
    sha256_bytes,
    sha256_file,
)
from miles.contracts.publish import publish_bytes
from miles.contracts.value_report import VALUE_EVAL_REPORT_SCHEMA, parse_report
from miles.contracts.value_schema import (
    MANIFEST_NAME,
    VALUE_PRETRAIN_CONTRACT_NAME,
    VALUE_PRETRAIN_CONTRACT_SCHEMA,
    VALUE_PRETRAIN_SCHEMA,
    ValueDatasetSpec,
    check_contract,
    contract_path,
    load_value_pretrain_manifest,
)

LINK_FOLDER_NAME = "value_pretrain_links"
LINK_SCHEMA = "miles.value-pretrain-link.v1"
RUN_RECORD_NAME = "run.json"
RUN_CONFIG_NAME = "config.yaml"
RUN_SCHEMA = "miles.run.v1"

_STAGES = (
    "manifest",
    "train data",
    "held-out data",
    "conversion report",
    "contract",
    "checkpoint",
    "evaluation report",
    "run",
    "run settings",
    "run checkpoint",
)


@dataclass(frozen=True)
class Link:
    """One link of the chain: what it is, where it lies, whether it holds, and what was proven or found broken."""

    name: str
    path: Path
    ok: bool
    detail: str


def iteration_folder(folder: str | os.PathLike[str], iteration: int) -> Path:
    """Return where a checkpoint of `iteration` lies below a save folder."""
    return Path(folder) / f"iter_{iteration:07d}"


def _relative(path: Path, start: Path) -> str:
    return Path(os.path.relpath(real_path(path), real_path(start))).as_posix()


def write_link_record(
    folder: str | os.PathLike[str], *, contract: bytes, completed_steps: int, manifest_path: Path
) -> Path:
    """Publish the link record of a contract, before the contract itself.

    Args:
        folder: the critic folder.
        contract: the contract's canonical bytes.
        manifest_path: the manifest the critic was trained from.
    """
    folder = Path(folder)
    checkpoint = iteration_folder(folder, completed_steps)
    files = checkpoint / CHECKPOINT_MANIFEST_NAME
    digest = sha256_bytes(contract)
    record = sealed(
        {
            "schema": LINK_SCHEMA,
            "contract_sha256": digest,
            "completed_steps": completed_steps,
            "manifest_path": str(manifest_path),
            # Found again when critic and data were moved together.
            "manifest_relative_path": _relative(manifest_path, folder),
            "checkpoint": checkpoint.name,
            "checkpoint_manifest_sha256": sha256_file(files) if files.is_file() else None,
        }
    )
    links = folder / LINK_FOLDER_NAME
    links.mkdir(exist_ok=True)
    return publish_bytes(links / f"{digest}.json", canonical_json_bytes(record))


def prune_link_records(folder: str | os.PathLike[str], *, contract: bytes) -> None:
    """Delete the link records of earlier contracts, once the contract of `contract`'s bytes is published."""
    keep = f"{sha256_bytes(contract)}.json"
    for record in (Path(folder) / LINK_FOLDER_NAME).glob("*.json"):
        if record.name != keep:
            record.unlink(missing_ok=True)


def read_link_record(folder: Path, digest: str, completed_steps: int) -> dict[str, Any]:
    """Return the link record of the contract of that SHA-256 and step in a critic folder.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not what was written, or a later contract was published too.
    """
    links = folder / LINK_FOLDER_NAME
    path = links / f"{digest}.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no link record {LINK_FOLDER_NAME}/{path.name}: the contract is not one that was published here"
        )
    try:
        record = _read_link_record(path)
        if record["completed_steps"] != completed_steps:
            raise ValueError("speaks of another contract")
    except (ValueError, OSError) as error:
        raise ValueError(f"link record {LINK_FOLDER_NAME}/{path.name}: {error}") from error
    for other in sorted(links.glob("*.json")):
        if other != path:
            try:
                steps = _read_link_record(other)["completed_steps"]
            except (ValueError, OSError) as error:
                raise ValueError(f"link record {LINK_FOLDER_NAME}/{other.name}: {error}") from error
            if steps > completed_steps:
                raise ValueError(
                    f"is of step {completed_steps}, but step {steps} was published too: an older contract was put "
                    "back, or publication was interrupted; resume the training to finish it"
                )
    return record


def describe_checkpoint(run_dir: str | os.PathLike[str], checkpoint: str | os.PathLike[str]) -> dict[str, str]:
    """Return the `checkpoints` entry of a run record for a saved checkpoint folder."""
    return {
        "path": _relative(Path(checkpoint), Path(run_dir)),
        "manifest_sha256": sha256_file(Path(checkpoint) / CHECKPOINT_MANIFEST_NAME),
    }


def describe_value_pretraining(
    run_dir: str | os.PathLike[str],
    *,
    critic_load: str | os.PathLike[str],
    eval_report: str | os.PathLike[str] | None = None,
) -> dict[str, Any]:
    """Return the `value_pretraining` section of a run record: the contract a run consumed or made, and its report."""
    contract = contract_path(critic_load)
    return {
        "contract_path": _relative(contract, Path(run_dir)),
        "contract_sha256": sha256_file(contract),
        "eval_report_path": None if eval_report is None else _relative(Path(eval_report), Path(run_dir)),
        "eval_report_sha256": None if eval_report is None else sha256_file(eval_report),
    }


def write_run_record(run_dir: str | os.PathLike[str], record: Mapping[str, Any]) -> dict[str, Any]:
    """Seal and publish `run.json`, replacing an earlier one, and return what was written.

    Args:
        record: anything JSON can say. The chain reads `value_pretraining` (an object or None), `checkpoints` (a list
            of `describe_checkpoint`) and `starts` (objects with the `config_sha256` of config.yaml, of which the last
            one's file is there), each optional.
    """
    body = {"schema": RUN_SCHEMA, **record}
    written = sealed(body)
    publish_bytes(Path(run_dir) / RUN_RECORD_NAME, readable_json_bytes(written))
    return written


def read_run_record(run_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Read `run.json` and check its seal.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not the file that was written.
    """
    path = Path(run_dir) / RUN_RECORD_NAME
    record = _read_object(path)
    if record.get("schema") != RUN_SCHEMA:
        raise ValueError(f"schema must be {RUN_SCHEMA!r}, got {record.get('schema')!r}")
    check_seal(record)
    if path.read_bytes() != readable_json_bytes(record):
        raise ValueError("not the bytes that were written: layout changed")
    return record


def _read_object(path: Path) -> dict[str, Any]:
    require_file(path)
    try:
        value = parse_strict_json(path.read_bytes())
    except StrictJsonError as error:
        raise ValueError(f"invalid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object")
    return value


def _fail(error: Exception) -> str:
    raise error


def _short(digest: str) -> str:
    return f"sha256 {digest[:12]}"


def _require_digest(path: Path, expected: str, *, pinned_by: str) -> None:
    require_file(path)
    actual = sha256_file(path)
    if actual != expected:
        raise ValueError(f"SHA-256 mismatch: {pinned_by} says {expected}, the file is {actual}")


def _has_digest(path: Path, expected: str) -> bool:
    try:
        return sha256_file(path) == expected
    except OSError:
        return False


def _read_link_record(path: Path) -> dict[str, Any]:
    record = _read_object(path)
    if record.get("schema") != LINK_SCHEMA:
        raise ValueError(f"schema must be {LINK_SCHEMA!r}")
    check_seal(record)
    if canonical_json_bytes(record) != path.read_bytes():
        raise ValueError("not canonical JSON: the file was changed after it was written")
    require_text(record.get("manifest_path"), field="manifest_path")
    require_text(record.get("manifest_relative_path"), field="manifest_relative_path")
    require_int(record.get("completed_steps"), field="completed_steps", minimum=1)
    require_sha256(record.get("checkpoint_manifest_sha256"), field="checkpoint_manifest_sha256")
    if f"{record.get('contract_sha256')}.json" != path.name:
        raise ValueError("speaks of another contract")
    return record


class Progress(Protocol):
    """Told how many bytes are to be hashed, then of each piece that was; pieces come from several threads."""

    def start(self, total_bytes: int) -> None: ...

    def __call__(self, count: int) -> None: ...


_ITERATION = re.compile(r"iter_\d{7,}")
_LINE_WITH_TEXT = re.compile(rb"\S[^\n]*")


def _count_rows(path: Path) -> int:
    """Number of lines that are not blank."""
    require_file(path)
    rows, open_line_counted = 0, False
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            pieces = [match.span() for match in _LINE_WITH_TEXT.finditer(chunk)]
            line_end = chunk.find(b"\n")
            goes_on = open_line_counted and bool(pieces) and (line_end < 0 or pieces[0][0] < line_end)
            rows += len(pieces) - goes_on
            open_line_counted = (bool(pieces) and pieces[-1][1] == len(chunk)) or (open_line_counted and line_end < 0)
    return rows


@dataclass(frozen=True)
class _Leaf:
    """A link that leads nowhere: large files to read at the end of the walk, and a proof from what was read."""

    name: str
    path: Path
    jobs: list[tuple[int, Callable[[], Any]]]
    proof: Callable[..., str]


class _Walk:
    """Collects links; every artifact is looked at once, however many others point to it.

    The walk itself reads small files only. What is large and leads nowhere (data, shards) is hashed at its end, all
    files together, so that the cores share them and the whole is known beforehand.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._links: list[Link] = []
        self._seen: dict[tuple[str, Path], int] = {}
        self._leaves: list[_Leaf] = []
        self._stopped = threading.Event()

    def links(self) -> list[Link]:
        """Read what is left to read, and return all links from the manifest to the run."""
        jobs = [job for leaf in self._leaves for job in leaf.jobs]
        if self._progress is not None:
            self._progress.start(sum(size for size, _ in jobs))
        try:
            results = iter(in_parallel(jobs))
        except BaseException:
            # The program cannot end before its threads do, and a shard may take minutes.
            self._stopped.set()
            raise
        for leaf in self._leaves:
            mine = [next(results) for _ in leaf.jobs]
            self._add(leaf.name, leaf.path, lambda leaf=leaf, mine=mine: leaf.proof(*(f.result() for f in mine)))
        self._leaves.clear()
        return sorted(self._links, key=lambda link: _STAGES.index(link.name))

    def _hash(self, path: Path) -> tuple[int, Callable[[], str]]:
        def digest() -> str:
            require_file(path)
            return sha256_file(path, progress=self._advance)

        return os.path.getsize(path) if os.path.isfile(path) else 0, digest

    def _advance(self, count: int) -> None:
        if self._stopped.is_set():
            raise InterruptedError("interrupted")
        if self._progress is not None:
            self._progress(count)

    def _add_leaf(
        self, name: str, path: Path, jobs: list[tuple[int, Callable[[], Any]]], proof: Callable[..., str]
    ) -> None:
        if not self._known(name, path):
            self._leaves.append(_Leaf(name, path, jobs, proof))

    def _add(self, name: str, path: Path, proof: Callable[[], str]) -> bool:
        try:
            link = Link(name, path, True, proof())
        except (ValueError, OSError) as error:
            link = Link(name, path, False, error_text(error))
        except (KeyError, TypeError, AttributeError) as error:
            # A file that someone else wrote or edited may hold any JSON at all.
            link = Link(name, path, False, f"malformed: {type(error).__name__}: {error}")
        # The same artifact reached by a second way adds a line only when that way finds it broken.
        key = (name, real_path(path))
        if key not in self._seen:
            self._seen[key] = len(self._links)
            self._links.append(link)
        elif self._links[self._seen[key]].ok and not link.ok:
            self._links[self._seen[key]] = link
        return link.ok

    def _known(self, name: str, path: Path) -> bool:
        waiting = {(leaf.name, real_path(leaf.path)) for leaf in self._leaves}
        return (name, real_path(path)) in self._seen.keys() | waiting

    def manifest(self, path: Path, expected: str | None, *, pinned_by: str) -> None:
        fresh = not self._known("manifest", path)

        def proof() -> str:
            if expected is not None:
                _require_digest(path, expected, pinned_by=pinned_by)
            manifest = load_value_pretrain_manifest(path)
            pinned = f", as {pinned_by} says" if expected is not None else ""
            return f"{_short(manifest.sha256)}{pinned}"

        if self._add("manifest", path, proof) and fresh:
            manifest = load_value_pretrain_manifest(path)
            self._data("train data", manifest.train)
            if manifest.heldout is not None:
                self._data("held-out data", manifest.heldout, train=manifest.train)
            self._conversion_report(path)

    def _conversion_report(self, manifest: Path) -> None:
        provenance = _read_object(manifest).get("provenance")
        entry = provenance.get("conversion_report") if isinstance(provenance, dict) else None
        if not isinstance(entry, dict):
            return
        path = real_path(manifest).parent / str(entry.get("path"))

        def proof() -> str:
            wanted = require_sha256(entry.get("sha256"), field="provenance.conversion_report.sha256")
            _require_digest(path, wanted, pinned_by="the manifest")
            report = _read_object(path)
            return f"{report.get('rows_kept')} of {report.get('rows_read')} rollouts kept, {_short(wanted)}"

        self._add("conversion report", path, proof)

    def _data(self, name: str, spec: ValueDatasetSpec, *, train: ValueDatasetSpec | None = None) -> None:
        def proof(digest: str, rows: int) -> str:
            if train is not None and spec.sha256 == train.sha256:
                raise ValueError("the held-out rows are the rows trained on: both splits have one SHA-256")
            if digest != spec.sha256:
                raise ValueError(f"SHA-256 mismatch: manifest says {spec.sha256}, the file is {digest}")
            if rows != spec.num_samples:
                raise ValueError(f"row count mismatch: manifest says {spec.num_samples}, the file has {rows}")
            return f"{rows} rows, {_short(spec.sha256)}"

        self._add_leaf(name, spec.path, [self._hash(spec.path), (0, partial(_count_rows, spec.path))], proof)

    def critic(self, folder: Path, expected: str | None, *, pinned_by: str) -> None:
        path = folder / VALUE_PRETRAIN_CONTRACT_NAME
        fresh = not self._known("contract", path)
        contract: dict[str, Any] = {}
        record: dict[str, Any] = {}

        def proof() -> str:
            contract.update(check_contract(_read_object(path)))
            data = path.read_bytes()
            if canonical_json_bytes(contract) != data:
                raise ValueError("not canonical JSON: the file was changed after it was written")
            digest = sha256_bytes(data)
            if expected is not None and digest != expected:
                raise ValueError(f"SHA-256 mismatch: {pinned_by} says {expected}, the file is {digest}")
            record.update(read_link_record(folder, digest, contract["completed_steps"]))
            return f"step {contract['completed_steps']}, {_short(digest)}"

        self._add("contract", path, proof)
        if not fresh or not contract:
            return
        if record:
            candidates = [real_path(folder / record["manifest_relative_path"]), Path(record["manifest_path"])]
            wanted = contract["source_manifest_sha256"]
            there = [candidate for candidate in candidates if os.path.isfile(candidate)]
            matching = [candidate for candidate in there if _has_digest(candidate, wanted)]
            manifest_path = (matching or there or candidates)[0]
            self.manifest(manifest_path, wanted, pinned_by="the contract")
            self._agreement(path, contract, manifest_path)
        self.checkpoint(
            iteration_folder(folder, contract["completed_steps"]),
            record.get("checkpoint_manifest_sha256"),
            name="checkpoint",
            pinned_by="the contract's link record",
            iteration=contract["completed_steps"],
        )

    def _agreement(self, path: Path, contract: Mapping[str, Any], manifest_path: Path) -> None:
        try:
            manifest = load_value_pretrain_manifest(manifest_path)
        except (ValueError, OSError):
            return

        def proof() -> str:
            for field, stated, actual in (
                ("train_dataset_sha256", contract["train_dataset_sha256"], manifest.train.sha256),
                ("objective", contract["objective"], manifest.objective.to_dict()),
            ):
                if stated != actual:
                    raise ValueError(f"{field} is {stated}, the manifest has {actual}")
            return ""

        self._add("contract", path, proof)

    def checkpoint(
        self, folder: Path, expected: str | None, *, name: str, pinned_by: str, iteration: int | None = None
    ) -> None:
        if self._known(name, folder):
            # Its files are looked at once; another pin on the manifest is another matter.
            try:
                read_checkpoint_manifest(folder, expected_sha256=expected)
            except (ValueError, OSError) as error:
                self._add(name, folder, partial(_fail, error))
            return

        try:
            if not folder.is_dir():
                raise FileNotFoundError("missing")
            if expected is not None:
                _require_digest(folder / CHECKPOINT_MANIFEST_NAME, expected, pinned_by=pinned_by)
            manifest = check_checkpoint_listing(folder)
        except (ValueError, OSError) as error:
            self._add(name, folder, partial(_fail, error))
            return

        def proof(*digests: str) -> str:
            check_checkpoint_digests(folder, manifest, digests)
            facts = manifest["facts"]
            if iteration is not None and facts.get("iteration", iteration) != iteration:
                raise ValueError(
                    f"{CHECKPOINT_MANIFEST_NAME}: iteration is {facts['iteration']}, expected {iteration}"
                )
            if name == "checkpoint" and facts.get("role", "critic") != "critic":
                raise ValueError(f"{CHECKPOINT_MANIFEST_NAME}: role is {facts['role']!r}, expected 'critic'")
            size = sum(entry["size"] for entry in manifest["files"])
            alone = "" if expected is not None else "; no contract or run that pins it was checked"
            return f"{len(manifest['files'])} files, {size / 1e6:.1f} MB{alone}"

        self._add_leaf(name, folder, [self._hash(path) for path in checkpoint_files(folder, manifest)], proof)

    def report(self, path: Path, expected: str | None, *, pinned_by: str, critic_folder: Path | None = None) -> None:
        report: dict[str, Any] = {}

        def proof() -> str:
            if expected is not None:
                _require_digest(path, expected, pinned_by=pinned_by)
            require_file(path)
            report.update(parse_report(path.read_bytes()))
            figures = report["aggregate"]
            shown = ", ".join(
                f"{name.split('_')[0]} EV {figures[name]['metrics']['explained_variance']:+.4f}" for name in figures
            )
            return f"gate {'passed' if report['passed'] else 'FAILED'}, {shown}"

        if not self._add("evaluation report", path, proof):
            return
        checkpoint = report["checkpoint"]
        folder = critic_folder or Path(checkpoint["path"])
        self.critic(folder, checkpoint.get("contract_sha256"), pinned_by="the evaluation report")
        pinned = checkpoint.get("checkpoint_manifest_sha256")
        if pinned is not None:
            self.checkpoint(
                iteration_folder(folder, checkpoint["contract_completed_steps"]),
                pinned,
                name="checkpoint",
                pinned_by="the evaluation report",
            )
        self._report_agreement(path, report, folder)

    def _report_agreement(self, path: Path, report: Mapping[str, Any], folder: Path) -> None:
        stated = report["manifest"]
        manifests = [link.path for link in self._links if link.name == "manifest"]
        if not manifests:
            self.manifest(Path(stated["path"]), stated["sha256"], pinned_by="the evaluation report")
            manifests = [Path(stated["path"])]
        try:
            manifest = load_value_pretrain_manifest(manifests[0])
            contract = check_contract(_read_object(folder / VALUE_PRETRAIN_CONTRACT_NAME))
        except (ValueError, OSError):
            return

        def proof() -> str:
            spec = {"train": manifest.train, "heldout": manifest.heldout}.get(stated["split"])
            if spec is None:
                raise ValueError(f"split {stated['split']!r} is not in the manifest")
            for field, said, actual in (
                ("manifest.sha256", stated["sha256"], manifest.sha256),
                ("manifest.dataset_sha256", stated["dataset_sha256"], spec.sha256),
                ("manifest.dataset_num_samples", stated["dataset_num_samples"], spec.num_samples),
                (
                    "checkpoint.contract_completed_steps",
                    report["checkpoint"]["contract_completed_steps"],
                    contract["completed_steps"],
                ),
            ):
                if said != actual:
                    raise ValueError(f"{field} is {said}, the chain has {actual}")
            return ""

        self._add("evaluation report", path, proof)

    def run(self, folder: Path) -> None:
        record: dict[str, Any] = {}

        def proof() -> str:
            record.update(read_run_record(folder))
            for entry in record.get("checkpoints", []):
                require_text(entry["path"], field="checkpoints path")
                require_sha256(entry["manifest_sha256"], field="checkpoints manifest_sha256")
            for entry in record.get("starts", []):
                require_sha256(entry["config_sha256"], field="starts config_sha256")
            used = record.get("value_pretraining")
            if used is not None:
                require_text(used["contract_path"], field="value_pretraining.contract_path")
                require_sha256(used["contract_sha256"], field="value_pretraining.contract_sha256")
                if used.get("eval_report_path") is not None:
                    require_sha256(used["eval_report_sha256"], field="value_pretraining.eval_report_sha256")
            return f"{len(record.get('starts', []))} starts, {len(record.get('checkpoints', []))} checkpoints"

        if not self._add("run", folder / RUN_RECORD_NAME, proof):
            return
        used = record.get("value_pretraining")
        if used is not None:
            contract = real_path(folder / used["contract_path"])
            self.critic(contract.parent, used["contract_sha256"], pinned_by="the run")
            if used.get("eval_report_path") is not None:
                self.report(
                    real_path(folder / used["eval_report_path"]),
                    used["eval_report_sha256"],
                    pinned_by="the run",
                    critic_folder=contract.parent,
                )
        starts = record.get("starts", [])
        if starts:
            self._config(folder / RUN_CONFIG_NAME, starts[-1]["config_sha256"])
        for entry in record.get("checkpoints", []):
            self.checkpoint(
                real_path(folder / entry["path"]),
                entry["manifest_sha256"],
                name="run checkpoint",
                pinned_by="the run",
            )

    def _config(self, path: Path, expected: str) -> None:
        def proof(digest: str) -> str:
            if digest != expected:
                raise ValueError(f"SHA-256 mismatch: the run says {expected}, the file is {digest}")
            return f"{_short(digest)}, as the run says"

        self._add_leaf("run settings", path, [self._hash(path)], proof)


def verify_chain(path: str | os.PathLike[str], *, progress: Progress | None = None) -> list[Link]:
    """Walk the chain from any of its artifacts, and return its links from the manifest to the run.

    Args:
        path: a run folder, a critic folder, one checkpoint folder, an evaluation report, a contract or a manifest.
        progress: told how many bytes there are to hash, and of each piece that was; called from several threads.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: `path` is none of these.
        OSError: the system's own reason, such as a loop of links.
    """
    path = Path(path)
    try:
        path.stat()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file or folder") from None
    walk = _Walk(progress)
    if path.is_dir():
        if os.path.lexists(path / RUN_RECORD_NAME) or os.path.lexists(path / RUN_CONFIG_NAME):
            walk.run(path)
        elif os.path.lexists(path / VALUE_PRETRAIN_CONTRACT_NAME) or (path / LINK_FOLDER_NAME).is_dir():
            walk.critic(path, None, pinned_by="")
        elif os.path.lexists(path / CHECKPOINT_MANIFEST_NAME):
            _walk_from_checkpoint(walk, path)
        else:
            raise ValueError(
                f"{path}: holds neither {RUN_RECORD_NAME}, {VALUE_PRETRAIN_CONTRACT_NAME} "
                f"nor {CHECKPOINT_MANIFEST_NAME}"
                + (f"; give {path / MANIFEST_NAME} for a data set" if (path / MANIFEST_NAME).is_file() else "")
            )
        return walk.links()
    if path.name == RUN_RECORD_NAME:
        walk.run(path.parent)
    elif path.name == VALUE_PRETRAIN_CONTRACT_NAME:
        walk.critic(path.parent, None, pinned_by="")
    elif path.name == CHECKPOINT_MANIFEST_NAME:
        _walk_from_checkpoint(walk, path.parent)
    else:
        _walk_by_schema(walk, path)
    return walk.links()


def _walk_from_checkpoint(walk: _Walk, folder: Path) -> None:
    critic = real_path(folder).parent
    try:
        steps = check_contract(_read_object(critic / VALUE_PRETRAIN_CONTRACT_NAME))["completed_steps"]
    except (ValueError, OSError):
        steps = None
    if steps is not None and real_path(folder) == iteration_folder(critic, steps):
        walk.critic(critic, None, pinned_by="")
    else:
        walk.checkpoint(folder, None, name="run checkpoint", pinned_by="")


def _walk_by_schema(walk: _Walk, path: Path) -> None:
    if not path.is_file():
        raise ValueError(f"{path}: neither a file nor a folder")
    if path.suffix == ".jsonl":
        # Not read to find out: it may be large.
        raise ValueError(f"{path}: a file of rows is checked by what pins it; give its manifest")
    try:
        schema = _read_object(path).get("schema")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if schema == VALUE_EVAL_REPORT_SCHEMA:
        walk.report(path, None, pinned_by="")
    elif schema == VALUE_PRETRAIN_SCHEMA:
        walk.manifest(path, None, pinned_by="")
    else:
        known = (
            VALUE_PRETRAIN_SCHEMA,
            VALUE_PRETRAIN_CONTRACT_SCHEMA,
            VALUE_EVAL_REPORT_SCHEMA,
            CHECKPOINT_MANIFEST_SCHEMA,
        )
        raise ValueError(f"{path}: schema {schema!r} is none of {', '.join(known)}")


def unchecked_checkpoints(links: Sequence[Link]) -> list[Path]:
    """Return the checkpoints that lie beside those of a chain, of which no link speaks, in order of their paths.

    They are those of a critic that later contracts superseded, and any of a run that it never recorded.
    """
    folders = {link.path.parent for link in links if link.name == "contract"}
    runs = [link.path.parent for link in links if link.name == "run"]
    if runs:
        folders |= {link.path.parent for link in links if link.name == "run checkpoint"}
    for run in runs:
        for parent, names, _ in os.walk(run):
            folders.add(Path(parent))
            names[:] = [name for name in names if not _ITERATION.fullmatch(name)]
    seen = {real_path(link.path) for link in links}
    found: set[Path] = set()
    for folder in sorted(folders):
        for path in sorted(folder.glob("iter_*")) if os.path.isdir(folder) else []:
            if _ITERATION.fullmatch(path.name) and path.is_dir() and real_path(path) not in seen:
                seen.add(real_path(path))
                found.add(path)
    return sorted(found)


def first_broken(links: Sequence[Link]) -> Link | None:
    """Return the first link that does not hold, or None."""
    return next((link for link in links if not link.ok), None)
