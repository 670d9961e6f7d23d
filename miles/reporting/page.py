"""The HTML around the pictures: no script, no network, colours for light and dark."""

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from miles.reporting.series import Setting

_STYLE = """
:root {
  color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --ink: #2b303b; --soft: #626b7a; --grid: #d9dde5;
  --c1: #2563c9; --c2: #c2540a; --c3: #17825a; --c4: #7d49c2; --c5: #b3306d; --c6: #8a6d00; --c7: #0f7d8c;
  --c8: #7b8494; --good: #17825a; --bad: #bb2b2b; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171c; --card: #1d2128; --ink: #dfe3ea; --soft: #9aa3b2; --grid: #39404c;
    --c1: #7aa9ff; --c2: #ff9a57; --c3: #57cd9b; --c4: #bf9bff; --c5: #ff85b8; --c6: #e0c04d; --c7: #55c4d3;
    --c8: #8d96a6; --good: #57cd9b; --bad: #ff7b7b; } }
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0 0 4px; }
h2 { font-size: 19px; margin: 38px 0 12px; }
h3 { font-size: 15px; margin: 0 0 6px; }
p { margin: 0 0 8px; } .soft { color: var(--soft); }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 14px; margin: 20px 0; }
.tile, figure, .card { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; }
.tile { padding: 12px 16px; } .tile b { display: block; font-size: 27px; font-weight: 650; line-height: 1.25; }
.tile span { color: var(--soft); font-size: 13px; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 16px; }
figure { margin: 0; padding: 14px 16px; } figure.wide { grid-column: 1 / -1; }
figure svg { width: 100%; height: auto; display: block; }
figure svg text { font-family: system-ui, sans-serif !important; }
figcaption { color: var(--soft); font-size: 13px; margin-top: 6px; }
.card { padding: 6px 16px; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td {
  text-align: left; padding: 5px 14px 5px 0; border-bottom: 1px solid var(--grid); vertical-align: top;
  overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 550; } tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
code, .mono { font-family: ui-monospace, monospace; font-size: 12.5px; }
tr.default td { color: var(--soft); }
.ok { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
summary { cursor: pointer; padding: 6px 0; }
.verdict { display: inline-block; padding: 2px 12px; border-radius: 99px; border: 1.5px solid currentColor; }
.trajectory { padding: 12px 16px; margin-bottom: 14px; }
.tokens { font: 13px/1.75 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin-top: 6px; }
.tokens span { border-radius: 3px; padding: 1px 0; }
.tokens .prompt, .tokens .masked { color: var(--soft); } .tokens .masked { text-decoration: underline dotted; }
.scale { display: inline-block; width: 160px; height: 11px; border-radius: 3px; margin: 0 8px; vertical-align: middle;
  background: linear-gradient(to right,
    color-mix(in srgb, var(--c2) 60%, transparent), transparent, color-mix(in srgb, var(--c1) 60%, transparent)); }
"""


@dataclass(frozen=True)
class Panel:
    """A picture with its title and a sentence that says what it shows."""

    title: str
    svg: str
    caption: str
    wide: bool = False


def escape(text: object) -> str:
    return html.escape(str(text))


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: Sequence[int] = (), mono: Sequence[int] = ()
) -> str:
    """Rows of plain text; `numeric` columns are set to the right, `mono` ones in a fixed-width face."""

    def cells(tag: str, texts: Sequence[str]) -> str:
        out = []
        for i, text in enumerate(texts):
            names = " ".join(n for n, columns in (("n", numeric), ("mono", mono)) if i in columns)
            out.append(f"<{tag}{f' class={chr(34)}{names}{chr(34)}' if names else ''}>{escape(text)}</{tag}>")
        return "".join(out)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class='card'><table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table></div>"


def _settings_table(settings: Sequence[Setting]) -> str:
    rows = []
    for setting in settings:
        kind = " class='default'" if setting.source == "default" else ""
        rows.append(
            f"<tr{kind}><td>{escape(setting.group)}</td><td class='mono'>{escape(setting.name)}</td>"
            f"<td class='mono'>{escape(setting.value)}</td><td>{escape(setting.source)}</td></tr>"
        )
    head = "<tr><th>group</th><th>setting</th><th>value</th><th>where it came from</th></tr>"
    return f"<div class='card'><table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table></div>"


def _chain_list(links: Sequence[tuple[str, str, bool, str]]) -> str:
    rows = "".join(
        f"<tr><td class='{'ok' if ok else 'bad'}'>{'ok' if ok else 'FAILED'}</td><td>{escape(name)}</td>"
        f"<td class='mono'>{escape(path)}</td><td>{escape(detail)}</td></tr>"
        for name, path, ok, detail in links
    )
    return f"<div class='card'><table><tbody>{rows}</tbody></table></div>"


def number(value: float) -> str:
    """Three significant digits, without exponents for everyday sizes."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.2e}"


def tiles_html(tiles: Sequence[tuple[str, str, str]]) -> str:
    """(label, large text, small text) side by side."""
    inner = "".join(
        f"<div class='tile'>{escape(a)}<b>{escape(b)}</b><span>{escape(c)}</span></div>" for a, b, c in tiles
    )
    return f"<div class='tiles'>{inner}</div>"


def panels_html(panels: Sequence[Panel]) -> str:
    """Pictures in columns, each with its title and caption."""
    figures = "".join(
        f"<figure{' class=wide' if panel.wide else ''}><h3>{escape(panel.title)}</h3>{panel.svg}"
        f"<figcaption>{escape(panel.caption)}</figcaption></figure>"
        for panel in panels
    )
    return f"<div class='panels'>{figures}</div>"


def document(title: str, parts: Sequence[str]) -> str:
    """One HTML file around what is shown."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def render_page(
    *,
    title: str,
    tiles: Sequence[tuple[str, str, str]],
    panels: Sequence[Panel],
    missing: Sequence[tuple[str, str]],
    notes: Sequence[str],
    others: Sequence[tuple[str, str, int, float]],
    stage_table: Sequence[tuple[str, str, str, str, str]],
    settings: Sequence[Setting],
    facts: Sequence[tuple[str, str]],
    links: Sequence[tuple[str, str, bool, str]],
) -> str:
    """The whole page as text. Everything but the panels' SVG is escaped here."""
    parts = [f"<h1>{escape(title)}</h1>", "<p class='soft'>Report of one run. Everything shown is in this file.</p>"]
    parts.append(tiles_html(tiles))
    parts += [f"<p class='soft'>{escape(note)}</p>" for note in notes]
    parts.append(f"<h2>Curves</h2>{panels_html(panels)}")
    if stage_table:
        head = ("stage", "steps it ran in", "median when it ran", "total", "share")
        parts.append("<h2>Seconds per stage</h2>" + table(head, stage_table, numeric=(1, 2, 3, 4)))
    if missing:
        rows = [(what, needs) for what, needs in missing]
        parts.append("<h2>Not recorded in this run</h2>" + table(("picture", "needs"), rows, mono=(1,)))
    if links:
        parts.append("<h2>Chain of artifacts</h2>" + _chain_list(links))
    if others:
        rows = [(name, stage, str(count), f"{last:.6g}") for name, stage, count, last in others]
        listed = table(("series", "stage", "points", "last value"), rows, numeric=(2, 3), mono=(0,))
        parts.append(
            f"<h2>Other series</h2><details><summary>{len(others)} without a picture</summary>{listed}</details>"
        )
    if facts:
        parts.append("<h2>Facts of the run</h2>" + table(("fact", "value"), facts, mono=(0, 1)))
    if settings:
        changed = [setting for setting in settings if setting.source != "default"]
        parts.append("<h2>Resolved settings</h2>")
        if changed:
            parts.append("<p class='soft'>Set by a file, a flag or a rule:</p>" + _settings_table(changed))
        summary = f"<summary>All {len(settings)} settings, defaults included</summary>"
        parts.append(f"<details>{summary}{_settings_table(settings)}</details>")
    return document(title, parts)
