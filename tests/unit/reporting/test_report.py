"""The report shows what was logged, names what was not, and is one file that needs no network."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from miles.config import Args
from miles.config.files import config_yaml
from miles.contracts.chain import Link
from miles.reporting.report import DRAWN_NAMES, TIME_STAGES, learning_curve_png, write_report
from miles.reporting.series import read_metrics, read_settings
from miles.reporting.wilson import wilson_interval

VOID = {"meta", "br", "path", "use", "rect", "line"}


class Page(HTMLParser):
    """Collects text, tags left open, and everything that could reach outside the file."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.outside: list[str] = []
        self.figures: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("script", "link", "iframe", "img"):
            self.outside.append(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href", "xlink:href") and not str(v).startswith("#")]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if self.open[-2:] == ["figure", "h3"]:
            self.figures.append(data)


def write_lines(folder: Path, lines: list[dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"time": 1e9 + i, **line}) + "\n" for i, line in enumerate(lines)]
    (folder / "metrics.jsonl").write_text("".join(rows))
    return folder


def full_run(folder: Path) -> Path:
    """A run of four steps that logged everything."""
    lines: list[dict] = []
    for step in range(5):
        low, high = wilson_interval(20 + 10 * step, 100)
        accuracy = {"eval/accuracy": 0.2 + step / 10, "eval/accuracy_low": low, "eval/accuracy_high": high}
        lines.append({"step": step, "stage": "eval", **accuracy, "eval/count": 100})
        if step == 0:
            continue
        lines.append({"step": step, "stage": "rollout", "rollout/reward_mean": 0.2, "rollout/count": 64,
                      "rollout/log_prob_difference_mean": 1e-6, "rollout/response_length_mean": 6.5,
                      "rollout/truncated_fraction": 0.0})  # fmt: skip
        train = ("policy_loss", "entropy", "approx_kl", "clip_fraction", "ratio_max", "ratio_min", "grad_norm", "lr",
                 "ess", "kl_loss", "kl_reward")  # fmt: skip
        lines.append({"step": step, "stage": "train", **{f"train/{name}": 0.5 for name in train}})
        lines.append({"step": step, "stage": "value", "value/loss": 1.0 / step, "value/grad_norm": 1.0,
                      "value/lr": 1e-4, "value/explained_variance": None if step == 2 else 0.1 * step})  # fmt: skip
        seconds = {name: 1.0 for name, _ in TIME_STAGES}
        lines.append({"step": step, "stage": "time", **seconds, "time/step_s": 7.0, "perf/tokens_per_s": 1234.5,
                      "idle/actor": 0.5, "idle/critic": 0.25, "idle/engines": 0.75,
                      "timeline": [["engines", "rollout", 0.0, 2.5], ["actor", "actor", 2.5, 3.5],
                                   ["critic", "critic", 2.5, 4.0]],
                      "sync/weight_version": step})  # fmt: skip
    lines.append({"step": 0, "stage": "sft", "sft/loss": 2.0})
    lines.append({"step": 0, "stage": "value_eval", "value/heldout_explained_variance": 0.4})
    write_lines(folder, lines)
    bins = [
        {"low": i / 10, "high": (i + 1) / 10, "n": 5 * (i > 0), "mean_value": None if i == 0 else i / 10 + 0.05,
         "mean_return": None if i == 0 else i / 10}
        for i in range(10)
    ]  # fmt: skip
    (folder / "eval.json").write_text(json.dumps({"calibration": {"token_weighted": bins}}))
    used = {"eval_report_path": "eval.json", "contract_sha256": "c" * 64}
    (folder / "run.json").write_text(
        json.dumps({"value_pretraining": used, "starts": [{"command": ["a<b>", "--lr"]}]})
    )
    (folder / "config.yaml").write_text(config_yaml(Args.build(lr=3e-4)))
    return folder


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> tuple[Path, str, Page]:
    folder = full_run(tmp_path_factory.mktemp("run") / "full")
    links = [
        Link("manifest", Path("data/manifest.json"), True, "sha256 agrees"),
        Link("checkpoint", Path("critic/iter_0000002"), False, "shard <0> has 3 bytes"),
    ]
    out = write_report(folder, links=links)
    text = out.read_text(encoding="utf-8")
    return out, text, Page(text)


def test_write_report_full_run_draws_every_picture_and_misses_none(full):
    _, text, page = full
    assert page.open == []
    assert text.count("<svg") == len(page.figures) == 23
    assert "Not recorded in this run" not in text
    for title in ("Held-out accuracy", "Reward", "Value loss", "Explained variance per batch", "Time per stage",
                  "Calibration of the critic", "Extremes of the probability ratio"):  # fmt: skip
        assert title in page.figures


def test_write_report_timeline_shows_the_newest_step_and_who_was_idle(full):
    text = " ".join(full[2].texts)
    assert "What ran when in step 4, the newest: 4 s" in text
    assert "Idle: engines 75.0 %, actor 50.0 %, critic 25.0 %." in text


def test_write_report_is_one_file_without_network_or_script(full):
    out, text, page = full
    assert page.outside == []
    assert "url(http" not in text
    assert [p.name for p in out.parent.iterdir() if p.suffix == ".html" or p.name.endswith(".tmp")] == ["report.html"]


def test_write_report_colours_follow_light_and_dark(full):
    text = full[1]
    assert "prefers-color-scheme: dark" in text
    svgs = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    # no fixed colour is left in a picture, and every variable it uses is defined for both
    assert set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", svgs)) <= set()
    for name in set(re.findall(r"var\((--\w+)\)", svgs)):
        assert len(re.findall(rf"{name}: #", text)) == 2, name


def test_write_report_svg_ids_are_unique_in_the_page(full):
    clips = re.findall(r'<clipPath id="([^"]+)"', full[1])
    assert clips
    assert len(clips) == len(set(clips))


def test_write_report_captions_say_what_the_numbers_say(full):
    text = " ".join(full[2].texts)
    assert "20.0 % at step 0, 60.0 % at step 4" in text
    assert "do not overlap" in text
    assert "3 of 3 batches lie above 0" in text
    assert "Undefined in 1 batches" in text
    assert "9 of them filled, 45 targets; the evaluation report, token weighted" in text
    # every bin predicts .05 more than is earned
    assert "Mean distance from the line 0.05, mean return minus prediction -0.05" in text
    assert "4 steps took 36.0 s, the median step 9 s" in text


def test_write_report_lists_settings_with_sources_facts_and_chain(full):
    _, text, page = full
    joined = " ".join(page.texts)
    assert "starts[0].command" in joined
    assert "a<b>, --lr" in joined
    assert "<b>, --lr" not in text
    assert "shard <0> has 3 bytes" in joined
    assert "FAILED" in joined
    assert "sync/weight_version" in joined
    assert re.search(r"<td class='mono'>lr</td><td class='mono'>0\.0003</td><td>code</td>", text)


def test_write_report_every_drawn_name_is_documented():
    text = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    assert [name for names in DRAWN_NAMES for name in names if f"`{name}`" not in text] == []


def test_write_report_missing_series_named_not_drawn(tmp_path):
    folder = write_lines(tmp_path / "run", [{"step": 1, "stage": "value", "value/loss": 0.5}])
    page = Page(write_report(folder, tmp_path / "elsewhere.html").read_text())
    assert page.figures == ["Value loss"]
    joined = " ".join(page.texts)
    for needed in ("eval/accuracy", "rollout/reward_mean", "value/explained_variance", "train/entropy", "time/*_s"):
        assert needed in joined
    assert "0.5 at step 1" in joined
    assert not (folder / "report.html").exists()


def test_write_report_series_of_nothing_but_undefined_values_is_missing(tmp_path):
    lines = [{"step": s, "stage": "value", "value/explained_variance": None} for s in range(3)]
    page = Page(write_report(write_lines(tmp_path, lines)).read_text())
    assert page.figures == []
    assert "Explained variance per batch" in " ".join(page.texts)


def test_write_report_stages_side_by_side_are_told_from_wall_time(tmp_path):
    # critic and actor update at the same time: 3 + 3 seconds of work in a step of 3
    busy = {"time/critic_s": 3.0, "time/actor_s": 3.0, "time/step_s": 3.0}
    text = write_report(write_lines(tmp_path, [{"step": s, "stage": "time", **busy} for s in range(10)])).read_text()
    assert "10 steps took 30.0 s, the median step 3 s" in text
    assert "add up to 30.0 s more than the clock showed" in text


def test_write_report_two_stages_of_one_name_stay_two_curves(tmp_path):
    lines = [{"step": s, "stage": stage, "value/loss": 1.0} for s in (1, 2) for stage in ("pretrain", "value")]
    text = write_report(write_lines(tmp_path, lines)).read_text()
    assert "value loss (pretrain): 1 at step 1" in text
    assert "value loss (value): 1 at step 1" in text


def test_write_report_rewards_outside_zero_one_have_no_binomial_band(tmp_path):
    lines = [{"step": s, "stage": "rollout", "rollout/reward_mean": -1.0 + s, "rollout/count": 8} for s in range(4)]
    assert "Wilson" not in write_report(write_lines(tmp_path, lines)).read_text()


def test_reward_band_rests_on_the_scored_samples_alone(tmp_path):
    # the same mean of ten rewards, whether or not thirty samples beside them got none
    def picture(count, unscored):
        figures = {"rollout/reward_mean": 0.5, "rollout/count": count, "rollout/unscored": unscored}
        lines = [{"step": step, "stage": "rollout", **figures} for step in (1, 2)]
        page = write_report(write_lines(tmp_path, lines)).read_text()
        return re.findall(r"<svg.*?</svg>", page, re.DOTALL)[0]

    assert picture(40, 30) == picture(10, 0) != picture(40, 0)


def test_write_report_long_run_keeps_the_extremes_of_extremes(tmp_path):
    lines = [{"step": s, "stage": "train", "train/ratio_max": 50.0 if s == 1234 else 1.5} for s in range(3000)]
    text = write_report(write_lines(tmp_path, lines)).read_text()
    assert "averaged over equal runs of steps" in text
    # the axis reaches the single peak, which a mean over its run would have flattened to 11
    assert re.search(r">50<|>20<", text)


def test_write_report_without_metrics_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl: no such file"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1, "stage": "a"}\n{"step": \n', r"metrics\.jsonl:2: not valid JSON"),
        ('{"step": "1", "stage": "a"}\n', r"metrics\.jsonl:1: expected an object with an integer 'step'"),
        ("[1]\n", r"metrics\.jsonl:1: expected an object"),
        ("[" * 100_000 + "\n", r"metrics\.jsonl:1: not valid JSON"),
        ('{"step": 1, "stage": "time", "timeline": [["a", 1]]}\n', r"metrics\.jsonl:1: expected a 'timeline' of"),
    ],
)
def test_read_metrics_bad_line_named(tmp_path, text, message):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        write_report(tmp_path)


def test_read_metrics_resume_and_kill_keep_what_is_known(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "stage": "train", "time": 10, "train/lr": 1}\n'
        '{"step": 1, "stage": "train", "time": 30, "train/lr": 2, "train/entropy": NaN}\n'
        '{"step": 1, "stage": "sft", "loss": 3}\n'
        '{"step": 2, "stage": "tra'
    )
    metrics = read_metrics(path)
    assert metrics.truncated
    assert metrics.seconds == 20
    assert metrics.names() == ["sft/loss", "train/lr"]
    assert metrics.get("train/lr").values == [2.0]
    assert metrics.num_not_finite == {"train/entropy": 1}


def test_read_settings_of_a_written_config_gives_every_value_and_source(tmp_path):
    args = Args.build(lr=3e-4, custom_rm_path="a  # b.py:score")
    path = tmp_path / "config.yaml"
    path.write_text(config_yaml(args))
    settings = {setting.name: setting for setting in read_settings(path)}
    assert (settings["lr"].value, settings["lr"].source) == ("0.0003", "code")
    assert "a  # b.py:score" in settings["custom_rm_path"].value
    assert settings["seed"].source == "default"
    assert all(setting.group for setting in settings.values())


def test_learning_curve_png_is_a_picture_of_the_expected_size(tmp_path):
    path = learning_curve_png(full_run(tmp_path / "run"), tmp_path / "curve.png")
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    assert (width, height) == (1080, 570)


def test_learning_curve_png_without_either_series_refused(tmp_path):
    folder = write_lines(tmp_path, [{"step": 1, "stage": "value", "value/loss": 0.5}])
    with pytest.raises(ValueError, match="neither eval/accuracy nor rollout/reward_mean"):
        learning_curve_png(folder, tmp_path / "curve.png")


def test_write_report_every_evaluation_set_is_drawn_and_told(tmp_path):
    lines = [
        {"step": step, "stage": "eval", f"eval/{name}/accuracy": level + step / 10, f"eval/{name}/count": 100}
        for step in (0, 1)
        for name, level in (("aime", 0.1), ("math", 0.5))
    ]
    text = write_report(write_lines(tmp_path / "run", lines)).read_text(encoding="utf-8")
    for words in ("Held-out accuracy of aime", "Held-out accuracy of math", "60.0 %", "20.0 %"):
        assert words in text


def test_read_metrics_bytes_that_are_no_text_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "stage": "a"}\n{"step": "\xff"}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not valid JSON"):
        write_report(tmp_path)


def test_read_metrics_number_that_no_float_holds_counts_as_not_finite(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "stage": "a", "time": {10**400}, "b": {10**400}}}\n')
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert metrics.num_not_finite == {"a/b": 1}
    assert metrics.seconds == 0.0


@pytest.mark.parametrize(
    ("used", "bins"),
    [
        ([1], None),
        ({"eval_report_path": 3}, None),
        ({"eval_report_path": "eval.json"}, [3]),
        ({"eval_report_path": "eval.json"}, [{"n": 2, "low": 0, "high": 1}]),
        ({"eval_report_path": "eval.json"}, [{"n": "many"}]),
    ],
)
def test_write_report_of_facts_that_somebody_edited_draws_the_rest(tmp_path, used, bins):
    write_lines(tmp_path, [{"step": 1, "stage": "rollout", "rollout/reward_mean": 0.5}])
    (tmp_path / "run.json").write_text(json.dumps({"value_pretraining": used}))
    (tmp_path / "eval.json").write_text(json.dumps({"calibration": {"token_weighted": bins}}))
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "Reward" in page.figures
    assert "Calibration of the critic" not in page.figures
