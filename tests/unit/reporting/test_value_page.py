"""A value evaluation report drawn as one file: what it shows, what it refuses, and that nothing leaves the file."""

import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from miles.contracts.canonical import readable_json_bytes, sealed, sha256_file
from miles.reporting.value_page import write_value_page

TOOL = Path(__file__).parents[3] / "tools" / "render_value_report.py"


class Page(HTMLParser):
    """Text, titles of pictures, tags left open, and whatever could reach outside the file."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text, self.outside, self.titles = "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br", "path", "use", "rect", "line"):
            self.open.append(tag)
        if tag in ("script", "link", "iframe", "img"):
            self.outside.append(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href", "xlink:href") and not str(v).startswith("#")]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in ("meta", "br", "path", "use", "rect", "line"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open[-2:] == ["figure", "h3"]:
            self.titles.append(data)


@pytest.fixture
def report(value_chain) -> Path:
    return value_chain.report


@pytest.fixture
def quick(monkeypatch):
    """Empty pictures, for tests that look at the rest of the page: a picture takes a quarter of a second."""
    for module in ("value_page", "report"):
        monkeypatch.setattr(f"miles.reporting.{module}.draw_svg", lambda draw, *, salt: "<svg></svg>")


def rewrite(path: Path, change) -> None:
    content = json.loads(path.read_bytes())
    change(content)
    path.write_bytes(readable_json_bytes(sealed(content)))


def test_value_page_draws_every_picture_in_one_file_without_network_or_script(report):
    out = write_value_page(report)
    assert out == report.with_suffix(".html")
    text = out.read_text()
    page = Page(text)
    assert page.open == []
    assert page.outside == []
    assert page.titles == [
        "Explained variance per batch", "Value against position in the response", "Calibration by tokens",
        "Calibration by trajectories",
    ]  # fmt: skip
    assert text.count("<svg") == 4
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)
    assert "gate: above 0" in text
    assert "gate passed" in page.text
    assert sha256_file(report) in page.text


def test_value_page_shows_worst_trajectories_as_ids_or_as_text(quick, report):
    rows = json.loads(report.read_bytes())["worst_trajectories"]
    page = Page(write_value_page(report).read_text())
    assert len(rows) == 10
    for row in rows:
        assert f"{row['sample_id']} (row {row['sample_index']}, batch {row['batch']})" in page.text
    assert f"{rows[0]['prompt_tokens'][-1]} {rows[0]['tokens'][0]}" in page.text

    def decode(ids):
        return [f"<{token}>" for token in ids]

    text = write_value_page(report, report.parent / "decoded.html", decode=decode).read_text()
    first = rows[0]["tokens"][0]
    assert f"&lt;{first}&gt;" in text
    assert f"<{first}>" not in text
    # The rows' second token is an observation: shown, but without a value.
    assert "class='masked'" in text
    assert f"title='token 0: value {rows[0]['values'][0]:.3g}'" in text


def test_value_page_of_a_failed_gate_says_which_criterion(quick, report):
    def worsen(content):
        content["gate"]["bias"] |= {"max_bias": 0.0, "passed": all(
            bias == 0.0 for bias in content["gate"]["bias"]["mean_residual"].values()
        )}  # fmt: skip
        content["passed"] = content["gate"]["passed"] = content["gate"]["bias"]["passed"]

    for weighting in ("token_weighted", "trajectory_weighted"):
        assert abs(json.loads(report.read_bytes())["bias"][weighting]["mean_residual"]) < 0.1
    rewrite(report, worsen)
    page = Page(write_value_page(report).read_text())
    passed = json.loads(report.read_bytes())["passed"]
    assert ("gate passed" if passed else "gate FAILED") in page.text
    assert page.text.count("FAILS") == (not passed)


def test_value_page_of_a_report_that_contradicts_itself_is_refused(report, tmp_path):
    def lie(content):
        content["aggregate"]["token_weighted"]["metrics"]["explained_variance"] = 0.99

    rewrite(report, lie)
    with pytest.raises(ValueError, match=r"eval_report\.json: report\.aggregate\.token_weighted"):
        write_value_page(report, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_value_page_of_a_report_that_lacks_what_its_fields_promise_is_refused(report):
    rewrite(report, lambda content: content["positions"]["groups"][0].pop("labels"))
    with pytest.raises(ValueError, match=r"eval_report\.json: malformed report: KeyError: 'labels'"):
        write_value_page(report)


def test_value_page_of_a_report_that_verify_calls_broken_is_refused(report):
    report.write_text(json.dumps(json.loads(report.read_bytes())))
    with pytest.raises(ValueError, match=r"eval_report\.json: not the bytes that were written"):
        write_value_page(report)


def test_value_page_of_another_programs_report_draws_what_is_there(quick, report):
    def strip(content):
        for ours in ("bias", "calibration", "positions", "worst_trajectories", "sum_tails"):
            del content[ours]
        del content["gate"]["bias"]

    rewrite(report, strip)
    page = Page(write_value_page(report).read_text())
    assert page.titles == ["Explained variance per batch"]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("render_value_report_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def byte_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer: every byte one token, so that a character outside ASCII takes several."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    folder.mkdir()
    core.save(str(folder / "tokenizer.json"))
    return folder


def test_decoder_gives_each_token_its_text_and_whole_characters(tool, tmp_path):
    from tokenizers import Tokenizer

    folder = byte_tokenizer(tmp_path / "tokenizer")
    text = "a <b> π=3, 漢字 and 🙂 end"
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert len(ids) == len(text.encode())
    pieces = tool.load_decoder(str(folder))(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text
    assert pieces[:2] == ["a", " "]
    assert "π" in pieces


def test_tool_never_replaces_a_file_be_it_the_report(quick, tool, report, capsys):
    before, page = report.read_bytes(), report.with_suffix(".html")
    assert tool.main([str(report)]) == 0
    for words, out in (([], page), (["--out", str(report)], report)):
        assert tool.main([str(report), *words]) == 1
        error = capsys.readouterr().err
        assert error == f"render_value_report: --out {out}: already exists and is never replaced\n"
    assert report.read_bytes() == before


def test_tool_writes_where_told_and_refuses_in_one_line(quick, tool, report, tmp_path, capsys):
    out, damaged = tmp_path / "page.html", tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "tokenizer.json").write_text("{}")
    folder = byte_tokenizer(tmp_path / "tokenizer")
    assert tool.main([str(report), "--tokenizer", str(folder), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert "decoded" in out.read_text()
    for words, message in (
        (["nowhere.json"], "REPORT nowhere.json: No such file or directory"),
        ([str(report), "--out", "nodir/x"], "--out nodir/x: No such file or directory"),
        ([str(folder / "tokenizer.json")], "not an evaluation report: report.schema must be"),
        ([str(report), "--tokenizer", str(tmp_path)], "holds no tokenizer.json"),
        ([str(report), "--tokenizer", str(damaged)], "damaged/tokenizer.json: "),
        ([str(out)], "page.html"),
    ):
        assert tool.main(words) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("render_value_report: ")
        assert message in line
