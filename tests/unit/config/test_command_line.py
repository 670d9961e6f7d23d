"""The command line and the YAML file below it: precedence, sources, and what is said of a mistake."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from miles.config import Args
from miles.config.args import _ELSEWHERE
from miles.config.files import config_yaml
from miles.config.groups import flag_of
from miles.utils.arguments import parse_args

AsFlags = Callable[[dict[str, Any]], list[str]]
FROZEN = Path(__file__).with_name("cli_flags.txt")


def refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> list[str]:
    """The lines on stderr of a command line that must end with status 2."""
    with pytest.raises(SystemExit) as ended:
        parse_args(argv)
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(": error: " in line for line in lines)
    return [line.split(": error: ", 1)[1] for line in lines]


def test_flags_go_on_top_of_the_file_and_each_value_knows_its_source(
    tmp_path: Path, online: dict[str, Any], as_flags: AsFlags
) -> None:
    file = tmp_path / "run.yaml"
    # PyYAML reads 1e-4, without a dot, as text.
    file.write_text("lr: 1e-4\nseed: 5\nbf16: true\nrollout_stop_token_ids: [1, 2]\neval_max_prompts: null\n")
    args = parse_args(["--config", str(file), "--seed", "6", "--no-bf16", *as_flags(online)])
    assert (args.lr, args.seed, args.bf16, args.rollout_stop_token_ids) == (1e-4, 6, False, [1, 2])
    assert args.source_of("lr") == f"file:{file}"
    assert args.source_of("seed") == "flag"
    assert args.source_of("gamma") == "default"
    assert args.source_of("critic_lr") == "derived:lr"


def test_flags_win_wherever_they_stand(tmp_path: Path, online: dict[str, Any], as_flags: AsFlags) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 5\n")
    assert parse_args(["--seed", "6", "--config", str(file), *as_flags(online)]).seed == 6


def test_null_on_the_command_line_unsets_what_the_file_set(
    tmp_path: Path, online: dict[str, Any], as_flags: AsFlags
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rollout_max_prompt_len: 7\n")
    argv = ["--config", str(file), "--rollout-max-prompt-len", "null", *as_flags(online)]
    assert parse_args(argv).rollout_max_prompt_len is None


def test_unset_folders_of_an_online_run_lie_in_the_run_folder(
    tmp_path: Path, online: dict[str, Any], as_flags: AsFlags
) -> None:
    online.pop("save")
    args = parse_args([*as_flags(online), "--run-dir", str(tmp_path / "run")]).replace(source="x", seed=1)
    assert args.save == f"{tmp_path}/run/checkpoints/actor"
    assert args.critic_save == f"{tmp_path}/run/checkpoints/critic"
    online["critic_save"] = f"{tmp_path}/critic"
    assert parse_args([*as_flags(online), "--run-dir", str(tmp_path / "run")]).critic_save == f"{tmp_path}/critic"


def test_lists_take_several_words_and_keep_commas(online: dict[str, Any], as_flags: AsFlags) -> None:
    args = parse_args(
        [
            *as_flags(online),
            *("--rollout-stop-token-ids", "3", "4"),
            *("--value-loss-type", "classification", "--value-reward-range", "-1", "0.5"),
            "--sglang-extra-args=--cuda-graph-bs=1,2",
            '--sglang-extra-args=--json={"a": [1]}',
        ]
    )
    assert args.rollout_stop_token_ids == [3, 4]
    assert args.value_reward_range == (-1.0, 0.5)
    assert args.sglang_extra_args == ["--cuda-graph-bs=1,2", '--json={"a": [1]}']


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--globl-batch-size", "4"], "unknown flag --globl-batch-size (did you mean --global-batch-size?)"),
        (["--global_batch_size", "4"], "unknown flag --global_batch_size (did you mean --global-batch-size?)"),
        (["--global-batch-siz=4"], "unknown flag --global-batch-siz (did you mean --global-batch-size?)"),
        (["--zzz"], "unknown flag --zzz"),
        (["--learning-rate", "1"], "unknown flag --learning-rate (did you mean --lr?)"),
        (["--batch_size=4"], "unknown flag --batch_size (did you mean --global-batch-size?)"),
        (["--model-path", "x", "--lr"], "unknown flag --model-path (did you mean --hf-checkpoint?)"),
        (["--config", "a.yaml", "--config=b.yaml"], "--config is given twice"),
        (
            ["--eval-prompt-data", "a:x", "--lr", "1", "--eval-prompt-data", "b:y"],
            "--eval-prompt-data is given twice; give all its values after one",
        ),
        (["stray"], "unexpected argument 'stray'"),
        (["--bf16", "true"], "unexpected argument 'true'"),
        (["--lr"], "argument --lr: expected one argument"),
        (["--lr", "fast"], "--lr: must be a valid number, unable to parse string as a number, got 'fast'"),
        (["--num-rollout", "1.5"], "--num-rollout: must be a valid integer"),
        (["--device", "tpu"], "--device: must be 'auto', 'cpu' or 'cuda', got 'tpu'"),
        (["--value-reward-range", "0"], "--value-reward-range"),
        (["--config", "/no/such.yaml"], "--config /no/such.yaml: cannot be read: No such file or directory"),
        (["--hf-checkpoint", ""], "--hf-checkpoint"),
        (["--hf-checkpoint", "m" * 300], f"--hf-checkpoint {'m' * 300}: File name too long"),
        (["--rollout-top-k", "0"], "--rollout-top-k: must be at least 1, or -1 for all, got"),
    ],
)
def test_mistake_on_the_command_line_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    (line,) = refused(capsys, argv)
    assert line.startswith(message)


def test_resume_of_no_folder_is_told(
    capsys: pytest.CaptureFixture[str], online: dict[str, Any], as_flags: AsFlags
) -> None:
    with pytest.raises(SystemExit):
        parse_args([*as_flags(online), "--resume"], entry="train")
    assert "--resume needs --run-dir, the folder of the run to go on with" in capsys.readouterr().err


def test_flag_given_twice_is_told_and_the_last_one_counts(
    capsys: pytest.CaptureFixture[str], online: dict[str, Any], as_flags: AsFlags
) -> None:
    extra = ["--sglang-extra-args=--log-level=debug", "--sglang-extra-args=--log-requests"]
    args = parse_args([*as_flags(online), *extra, "--resume", "--lr", "1", "--lr=2", "--no-resume"], entry="train")
    assert (args.lr, args.resume) == (2, False)
    assert args.sglang_extra_args == ["--log-level=debug", "--log-requests"]
    told = {line.partition(": warning: ")[2] for line in capsys.readouterr().err.splitlines() if "times" in line}
    assert told == {f"{flag} is given 2 times, the last one counts" for flag in ("--lr", "--no-resume")}


def test_working_folder_that_is_gone_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert refused(capsys, []) == ["the folder that this was started in is gone; change into one that exists"]


def test_names_of_other_stacks_are_not_ours_and_lead_to_fields() -> None:
    assert set(_ELSEWHERE.values()) <= Args.model_fields.keys()
    assert not {name.replace("-", "_") for name in _ELSEWHERE} & Args.model_fields.keys()


@pytest.mark.parametrize("prefix", ["--num-rollou", "--see", "--rollout-stop-token", "--bf1", "--no-bf", "--conf"])
def test_no_prefix_of_a_flag_is_accepted(capsys: pytest.CaptureFixture[str], prefix: str) -> None:
    assert refused(capsys, [prefix])[0].startswith(f"unknown flag {prefix}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nlearnig_rate: 1\n", ":2: unknown key 'learnig_rate'"),
        ("lr-decay-style: constant\n", ":1: unknown key 'lr-decay-style' (did you mean lr_decay_style?)"),
        ("lr: 1\nseed: 2\nlr: 3\n", ":3: key 'lr' is given twice (first in line 1)"),
        ("seed: 1\nlr: [1\n", ":3: not valid YAML"),
        ("- lr\n", ":1: expected a mapping of settings"),
        ("seed: 1\nlr: fast\n", ":2: lr: must be a valid number, unable to parse string as a number, got 'fast'"),
        ("lr: true\n", ":1: lr: a boolean is not accepted here, got True"),
        ("config: other.yaml\n", ":1: 'config' is for the command line only (--config)"),
        ("seed: 1\nprint_config: true\n", ":2: 'print_config' is for the command line only (--print-config)"),
        ("learning_rate: 1\n", ":1: unknown key 'learning_rate' (did you mean lr?)"),
        ("1: 2\n", ":1: unknown key 1"),
        ("seed: !!python/object:os.system {}\n", ":1: not valid YAML"),
        ("a: *b\n", ":1: not valid YAML"),
        ("seed: 1\n? [lr]\n: 1\n", ":2: not valid YAML: a key is a list or a mapping"),
        ("seed: 1\nrun_dir: 2024-13-45\n", ":2: not valid YAML: '2024-13-45' is no timestamp"),
        ("seed: 1\nrun_dir: a\x01b\n", r":2: not valid YAML: special characters are not allowed: '\x01'"),
        ("lr: !!float fast\n", ":1: not valid YAML: 'fast' is no float"),
        ("seed: 1\nnum_rollout: 010\n", ":2: not valid YAML: '010' is read as a number of base 8 or 60"),
        ("sao_online_recipe: []\n", ":1: sao_online_recipe: unknown SAO online recipe: []"),
        ("rm_timeout_s: 1:30\n", ":1: not valid YAML: '1:30' is read as a number of base 8 or 60"),
        (f"lr: {'[' * 5000}\n", ": not valid YAML: nested too deeply"),
        ('run_dir: "a\\0b"\n', ":1: run_dir: a zero byte is not accepted here"),
        ("rollout_stop_token_ids: [true]\n", ":1: rollout_stop_token_ids: a boolean is not accepted here"),
    ],
)
def test_mistake_in_the_file_names_file_line_and_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    (line,) = refused(capsys, ["--config", str(file)])
    assert line.startswith(f"{file}{message}")


def test_file_that_is_no_text_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    (line,) = refused(capsys, ["--config", str(file)])
    assert line.startswith(f"--config {file}: cannot be read")


def test_wrong_value_in_file_mended_on_the_command_line_is_accepted(
    tmp_path: Path, online: dict[str, Any], as_flags: AsFlags
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("lr: fast\n")
    assert parse_args(["--config", str(file), "--lr", "1", *as_flags(online)]).lr == 1


def test_every_broken_rule_is_reported(
    capsys: pytest.CaptureFixture[str], online: dict[str, Any], as_flags: AsFlags
) -> None:
    online |= {"max_tokens_per_gpu": 100, "min_lr": 1e-9}
    lines = refused(capsys, as_flags(online))
    assert [line.split()[0] for line in lines] == ["--max-tokens-per-gpu", "--min-lr"]


def test_warning_does_not_end_the_run(
    capsys: pytest.CaptureFixture[str], online: dict[str, Any], as_flags: AsFlags
) -> None:
    assert parse_args(as_flags(online | {"bf16": True, "device": "cpu"})).bf16
    assert "warning: --bf16 on a CPU" in capsys.readouterr().err


def test_print_config_shows_every_value_and_source_and_can_be_read_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, online: dict[str, Any], as_flags: AsFlags
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 5\n")
    argv = ["--config", str(file), *as_flags(online), "--sglang-extra-args=--a: #b"]
    with pytest.raises(SystemExit) as ended:
        parse_args([*argv, "--print-config"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    shown = yaml.safe_load(text)
    assert shown.keys() == Args.model_fields.keys() - {"config", "print_config"}
    sources = {
        line.split(":")[0]: line.rsplit("  # ", 1)[1] for line in text.splitlines() if line and line[0] not in "#-"
    }
    assert (sources["seed"], sources["gamma"], sources["prompt_data"]) == (f"file:{file}", "default", "flag")
    assert sources["critic_lr"] == "derived:lr"
    again = tmp_path / "again.yaml"
    again.write_text(text)
    reread = parse_args(["--config", str(again)])
    first = parse_args(argv).replace(source="x", run_dir=shown["run_dir"])
    assert reread.model_dump(exclude={"config"}) == first.model_dump(exclude={"config"})


def test_config_of_a_run_serves_another_run_folder_which_saves_to_its_own(
    online: dict[str, Any], tmp_path: Path, as_flags: AsFlags
) -> None:
    file = tmp_path / "config.yaml"
    flags = as_flags({name: value for name, value in online.items() if name not in ("save", "critic_save")})
    file.write_text(config_yaml(parse_args([*flags, "--run-dir", f"{tmp_path}/first"], entry="train")))
    assert yaml.safe_load(file.read_text())["save"] == f"{tmp_path}/first/checkpoints/actor"
    for flags, folder in (([], "first"), (["--run-dir", f"{tmp_path}/second"], "second")):
        args = parse_args(["--config", str(file), *flags], entry="train")
        assert args.save == f"{tmp_path}/{folder}/checkpoints/actor"
        assert args.critic_save == f"{tmp_path}/{folder}/checkpoints/critic"
        assert args.source_of("save") == "generated"
    elsewhere = ["--run-dir", f"{tmp_path}/second", "--save", f"{tmp_path}/elsewhere"]
    assert parse_args(["--config", str(file), *elsewhere], entry="train").save == f"{tmp_path}/elsewhere"
    text = file.read_text()
    edited = text.replace(f"run_dir: {tmp_path}/first ", f"run_dir: {tmp_path}/third ")
    assert edited != text
    file.write_text(f"{edited}# a remark\n")
    assert parse_args(["--config", str(file)], entry="train").save == f"{tmp_path}/third/checkpoints/actor"
    file.write_text(text)
    # The very same folder, as somebody's own word.
    file.write_text(file.read_text().replace("# generated", "# mine"))
    own = parse_args(["--config", str(file), "--run-dir", f"{tmp_path}/second"], entry="train")
    assert (own.save, own.critic_save) == (
        f"{tmp_path}/first/checkpoints/actor",
        f"{tmp_path}/first/checkpoints/critic",
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {"eps_clip_high": 0.2, "critic_lr": 1e-6, "global_batch_size": 8}),
        (["--eps-clip", "0.1"], {"eps_clip": 0.1, "eps_clip_high": 0.1}),
        (["--lr", "1e-4"], {"critic_lr": 1e-4}),
        (["--lambd", "0.9"], {"critic_lambd": 0.9}),
        (["--rollout-batch-size", "2"], {"global_batch_size": 4, "over_sampling_batch_size": 2}),
        (["--num-steps-per-rollout", "2"], {"global_batch_size": 4}),
        (["--advantage-estimator", "grpo"], {"use_critic": False}),
    ],
)
def test_resolved_file_given_back_with_a_flag_derives_anew_what_followed_from_it(
    online: dict[str, Any], tmp_path: Path, as_flags: AsFlags, flags: list[str], expected: dict[str, Any]
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(config_yaml(parse_args(as_flags(online), entry="train")))
    args = parse_args(["--config", str(file), *flags], entry="train")
    assert {name: getattr(args, name) for name in expected} == expected


def test_resolved_file_that_is_cut_off_is_refused_wherever_it_ends(
    online: dict[str, Any], tmp_path: Path, as_flags: AsFlags, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    lines = config_yaml(parse_args(as_flags(online), entry="train")).splitlines(keepends=True)
    for kept in (1, 2, len(lines) // 2, len(lines) - 1):
        file.write_text("".join(lines[:kept]))
        assert refused(capsys, ["--config", str(file)]) == [f"{file}: is cut off: it has no line '# end'"]
    # Lines that somebody takes into a file of his own are no such file.
    file.write_text("".join(lines[3:10]))
    parse_args(["--config", str(file), *as_flags(online)], entry="train")


def test_resolved_file_that_somebody_edited_keeps_what_was_written(
    online: dict[str, Any], tmp_path: Path, as_flags: AsFlags, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    text = config_yaml(parse_args(as_flags(online), entry="train"))
    for line in (lines := text.splitlines()):
        if line.startswith(("critic_lr: ", "gamma: ")):
            name, _, source = line.partition(":")
            lines[lines.index(line)] = f"{name}: 0.5  # {source.partition('  # ')[2]}"
    file.write_text("\n".join(lines))
    args = parse_args(["--config", str(file), "--lr", "1e-4"], entry="train")
    assert (args.critic_lr, args.gamma) == (0.5, 0.5)
    number = next(number for number, line in enumerate(lines, start=1) if line.startswith("critic_lr: "))
    (told,) = (line for line in capsys.readouterr().err.splitlines() if "though its comment says so" in line)
    assert told.partition(": warning: ")[2] == (
        f"{file}:{number}: critic_lr stays 0.5: it does not follow from lr, though its comment says so; without the "
        "line it would"
    )


def test_default_of_a_resolved_file_is_nobodys_word_and_of_a_file_by_hand_it_is(
    online: dict[str, Any], tmp_path: Path, as_flags: AsFlags
) -> None:
    resolved, by_hand = tmp_path / "config.yaml", tmp_path / "mine.yaml"
    resolved.write_text(config_yaml(parse_args(as_flags(online), entry="train")))
    by_hand.write_text("value_loss_type: mse\n")
    for file, source in ((resolved, "default"), (by_hand, f"file:{by_hand}")):
        args = parse_args(["--config", str(file), *as_flags(online)], entry="train")
        assert args.source_of("value_loss_type") == source


def test_file_by_hand_keeps_what_is_equal_to_what_would_follow(
    online: dict[str, Any], tmp_path: Path, as_flags: AsFlags
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("eps_clip: 0.2\neps_clip_high: 0.2  # as eps_clip\n")
    args = parse_args(["--config", str(file), *as_flags(online), "--eps-clip", "0.1"], entry="train")
    assert (args.eps_clip, args.eps_clip_high) == (0.1, 0.2)


def test_what_a_flag_said_of_one_start_does_not_come_back_with_the_resolved_file(
    online: dict[str, Any], tmp_path: Path, as_flags: AsFlags
) -> None:
    file = tmp_path / "config.yaml"
    once = ["--canary-one-step", "--fault-injection", "save@1=kill_actor"]
    file.write_text(config_yaml(parse_args([*as_flags(online), *once], entry="train")))
    assert yaml.safe_load(file.read_text())["canary_one_step"] is True
    args = parse_args(["--config", str(file)], entry="train")
    assert (args.canary_one_step, args.fault_injection, args.num_rollout) == (False, [], online["num_rollout"])
    file.write_text(config_yaml(args.replace(source="flag", resume=True, allow_config_change=["lr"])))
    args = parse_args(["--config", str(file)], entry="train")
    assert (args.resume, args.allow_config_change) == (False, [])
    # A file of one's own is another thing: who restarts a job by a script has it there.
    own = tmp_path / "own.yaml"
    own.write_text(f"resume: true\nrun_dir: {tmp_path}/run\n")
    assert parse_args(["--config", str(own), *as_flags(online)], entry="train").resume


def test_config_of_a_resumed_run_begins_as_that_run_began(
    online: dict[str, Any], tmp_path: Path, as_flags: AsFlags
) -> None:
    file = tmp_path / "config.yaml"
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "latest").write_text("iter_0000001\n")
    began = {"load": f"{tmp_path}/actor", "value_loss_type": "classification", "value_num_bins": 21}
    file.write_text(config_yaml(parse_args(as_flags(online), entry="train").replace(source="resume", **began)))
    args = parse_args(["--config", str(file)], entry="train")
    assert {name: getattr(args, name) for name in began} == began


def test_print_config_shows_a_configuration_that_would_be_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(["--print-config", "--gamma", "0.5"])
    assert ended.value.code == 0
    streams = capsys.readouterr()
    assert yaml.safe_load(streams.out)["gamma"] == 0.5
    assert "a run would be refused: online training needs --prompt-data" in streams.err


def test_help_is_grouped_and_describes_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in Args.model_fields.items():
        assert flag_of(name) in text
        assert " ".join((field.description or "").split()) in text.replace("- ", "-") or name in text
    assert "optimizer: --lr" in text


def test_the_command_line_is_frozen() -> None:
    """A flag is added, renamed or removed only together with cli_flags.txt."""
    assert [flag_of(name) for name in sorted(Args.model_fields)] == FROZEN.read_text().split()


def test_parsing_imports_no_training_library_and_is_quick() -> None:
    program = (
        "import sys, time; start = time.process_time(); from miles.utils.arguments import parse_args; "
        "import contextlib, io\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()), "
        "contextlib.redirect_stderr(io.StringIO()): parse_args(['--print-config', '--lr', '1'])\n"
        "heavy = {'torch', 'ray', 'transformers', 'sglang', 'numpy'}\n"
        "print(time.process_time() - start, sorted(heavy & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    seconds, _, modules = done.stdout.strip().partition(" ")
    assert modules == "[]"
    assert float(seconds) < 1.5


# ---------------------------------------------------------------- the value-pretraining manifest


def test_manifest_gives_steps_and_objective(offline: dict[str, Any], as_flags: AsFlags) -> None:
    """Ten rows in batches of four are two steps an epoch."""
    args = parse_args(as_flags(offline | {"value_pretrain_epochs": 3}))
    assert args.num_rollout == 6
    assert (args.value_loss_type, args.value_num_bins, args.value_reward_range) == ("classification", 11, (0.0, 1.0))
    assert args.source_of("num_rollout") == f"manifest:{offline['value_pretrain_manifest']}"


def test_steps_of_a_resolved_file_follow_from_the_epochs_anew(
    offline: dict[str, Any], tmp_path: Path, as_flags: AsFlags
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(config_yaml(first := parse_args(as_flags(offline | {"value_pretrain_epochs": 3}))))
    assert parse_args(["--config", str(file)]).num_rollout == first.num_rollout == 6
    assert parse_args(["--config", str(file), "--value-pretrain-epochs", "1"]).num_rollout == 2


def test_stated_steps_must_be_the_plans(
    capsys: pytest.CaptureFixture[str], offline: dict[str, Any], as_flags: AsFlags
) -> None:
    assert parse_args(as_flags(offline | {"num_rollout": 2})).num_rollout == 2
    assert refused(capsys, as_flags(offline | {"num_rollout": 3})) == [
        "--num-rollout 3 differs from the 2 steps of the batch plan"
    ]


def test_stated_objective_must_be_the_manifests(
    capsys: pytest.CaptureFixture[str], offline: dict[str, Any], as_flags: AsFlags
) -> None:
    (line,) = refused(capsys, as_flags(offline | {"value_num_bins": 51}))
    assert line.startswith("--value-num-bins is 51, the objective of")


def test_missing_manifest_is_one_line(
    capsys: pytest.CaptureFixture[str], offline: dict[str, Any], as_flags: AsFlags
) -> None:
    (line,) = refused(capsys, as_flags(offline | {"value_pretrain_manifest": "/no/manifest.json"}))
    assert "/no/manifest.json" in line


def test_wrong_manifest_digest_is_refused(
    capsys: pytest.CaptureFixture[str], offline: dict[str, Any], as_flags: AsFlags
) -> None:
    (line,) = refused(capsys, as_flags(offline | {"value_pretrain_manifest_sha256": "0" * 64}))
    assert "SHA-256 mismatch" in line


def test_entry_follows_the_manifest_unless_it_is_stated(
    capsys: pytest.CaptureFixture[str], offline: dict[str, Any], online: dict[str, Any], as_flags: AsFlags
) -> None:
    assert Path(parse_args(as_flags(offline)).run_dir or "").name.startswith("train_value-")
    assert Path(parse_args(as_flags(online)).run_dir or "").name.startswith("train-")
    with pytest.raises(SystemExit):
        parse_args(as_flags(online), entry="train_value")
    assert "value pretraining needs --value-pretrain-manifest" in capsys.readouterr().err
