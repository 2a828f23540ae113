"""Charts of numbers: as SVG for a notebook, and in pages of HTML that need no network.

In a page Bokeh draws, whose script is part of it. A page follows the reader's choice of light or dark.
"""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparkdl.codec.describe import table, without_credentials
from sparkdl.errors import optional_library

WIDTH, HEIGHT = 300, 150
_LEFT, _TOP, _BOTTOM = 52, 22, 18
MOST_POINTS = 400
"""The most points of a line in a notebook."""
PAGE_POINTS = 24_000
"""The most points of all lines of a page: 0.6 MB, so that a page stays below 2 MB with Bokeh's 1.3."""
LINE_POINTS = 2_000
THIN, THICK = "#7ba5cf", "#2f7fc4"
COLOURS = ("#d9603f", "#5c9c60", "#9a6cc2", "#d99a2b", "#2a9d8f", "#a3785f", "#3b82c4", "#d1629a")
_INK, _GRID, _PAPER, _FAULT = "#7a7b7c", "#bdbebf", "#fdfefe", "#d03f3e"
"""All but the last are replaced in the reader's browser."""


@dataclass(frozen=True)
class Line:
    """A line of a panel; ``dots`` marks its points, which a ``width`` of 0 does not join."""

    name: str
    points: Sequence[tuple[float, float]] | np.ndarray
    colour: str
    width: float = 2.0
    dots: bool = False

    def thinned(self, most: int) -> np.ndarray:
        """Return about ``most`` of the finite points: the extremes of each stretch, and both ends."""
        points = np.asarray(self.points, np.float64).reshape(-1, 2)
        points = points[np.isfinite(points[:, 1])]
        if len(points) <= most:
            return points
        chosen = {0, len(points) - 1}
        bounds = np.linspace(0, len(points), most // 2 + 1).astype(int)
        for begin, end in itertools.pairwise(bounds):
            values = points[begin:end, 1]
            chosen |= {int(begin + values.argmin()), int(begin + values.argmax())}
        return points[sorted(chosen)]


@dataclass(frozen=True)
class Panel:
    """Lines with common axes; ``marks`` are places on the horizontal one."""

    title: str
    lines: Sequence[Line]
    marks: Sequence[float] = ()
    across: str = "iteration"
    from_zero: bool = False

    @property
    def log(self) -> bool:
        """Return whether the values are better read on a logarithmic scale."""
        if self.from_zero:
            return False
        values = [line.thinned(MOST_POINTS)[:, 1] for line in self.lines]
        # single iterations may be far off, such as a last batch of two samples
        steady = [each for each, line in zip(values, self.lines, strict=True) if line.width > 1]
        every, often = np.concatenate(values), np.concatenate(steady or [np.empty(0)])
        often = often if len(often) else every
        return bool(len(every) and every.min() > 0 and often.max() > 20 * often.min())


def as_svg(panel: Panel) -> str:
    """Return a small picture of a panel; it is empty if there is nothing to draw."""
    drawn_points = [line.thinned(MOST_POINTS) for line in panel.lines]
    every = np.concatenate(drawn_points) if drawn_points else np.empty((0, 2))
    if not len(every):
        return ""
    log, scale = panel.log, np.log if panel.log else np.asarray
    low, high = every.min(0), every.max(0)
    spans = high[0] - low[0] or 1, scale(high[1]) - scale(low[1]) or 1
    drawn, legend, at = [], [], max(_LEFT, 6.2 * len(panel.title) + 12)
    for line, points in zip(panel.lines, drawn_points, strict=True):
        across = _LEFT + (points[:, 0] - low[0]) / spans[0] * (WIDTH - _LEFT - 8)
        down = (scale(points[:, 1]) - scale(low[1])) / spans[1]
        placed = list(zip(across, _TOP + (1 - down) * (HEIGHT - _TOP - _BOTTOM), strict=True))
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        drawn.append(
            f"<polyline points='{text}' fill='none' stroke='{line.colour}' "
            f"stroke-width='{line.width}'/>"
        )
        if line.dots or len(placed) == 1:
            drawn += [
                f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.5' fill='{line.colour}'/>"
                for x, y in placed
            ]
        name = html.escape(line.name)
        legend.append(f"<text x='{at:.0f}' y='12' fill='{line.colour}'>{name}</text>")
        at += 6.2 * len(line.name) + 12
    marks = (
        f"<text x='{_LEFT - 4}' y='{_TOP + 4}' text-anchor='end'>{high[1]:.3g}</text>"
        f"<text x='{_LEFT - 4}' y='{HEIGHT - _BOTTOM}' text-anchor='end'>{low[1]:.3g}</text>"
        f"<text x='4' y='12'>{html.escape(panel.title)}</text>"
        f"<text x='{WIDTH - 8}' y='12' text-anchor='end' fill='#999'>"
        f"{'log scale' if log else ''}</text>"
        f"<text x='{_LEFT}' y='{HEIGHT - 4}'>{low[0]:,.0f}</text>"
        f"<text x='{WIDTH - 8}' y='{HEIGHT - 4}' text-anchor='end'>{panel.across} "
        f"{high[0]:,.0f}</text>"
        f"<path d='M{_LEFT},{_TOP}V{HEIGHT - _BOTTOM}H{WIDTH - 8}' fill='none' stroke='#999'/>"
    )
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' "
        "style='font:10px sans-serif;margin-right:16px' fill='currentColor'>"
        f"{marks}{''.join(drawn)}{''.join(legend)}</svg>"
    )


@dataclass(frozen=True)
class ParallelCoordinates:
    """Parallel coordinates: an axis for each name, and a line for each row of texts.

    ``places`` are from 0 to 1 on each axis, NaN where there is none; ``shades`` colour the lines.
    """

    names: Sequence[str]
    ticks: Sequence[Sequence[tuple[float, str]]]
    places: Sequence[Sequence[float]]
    texts: Sequence[Sequence[str]]
    shades: Sequence[float]
    best: int | None = None


@dataclass
class Page:
    """A page of headings, tables and charts, in which all text is escaped and secrets are hidden."""

    title: str
    _parts: list[str | Panel | ParallelCoordinates] = field(default_factory=list)

    def heading(self, text: str, note: str = "") -> None:
        self._parts.append(f"<h2>{_text(text)}</h2>" + (f"<p>{_text(note)}</p>" if note else ""))

    def line(self, text: str, kind: str = "") -> None:
        """Add a paragraph, or with ``kind`` "code" a block of code."""
        tag = "pre" if kind == "code" else "p"
        self._parts.append(f'<{tag} class="{kind}">{_text(text)}</{tag}>')

    def figures(self, values: Mapping[str, str]) -> None:
        """Add the figures that matter most, side by side."""
        cards = (f"<div><b>{_text(v)}</b>{_text(name)}</div>" for name, v in values.items())
        self._parts.append(f'<div class="cards">{"".join(cards)}</div>')

    def table(self, rows: Sequence[Sequence[str]], title: str = "", folded: bool = False) -> None:
        """Add a table, whose first row is its head if there are more than two columns."""
        clean = [[without_credentials(str(cell)) for cell in row] for row in rows]
        if not clean:
            return
        head, body = (clean[0], clean[1:]) if len(clean[0]) > 2 else (("", ""), clean)
        shown = f'<div class="wide">{table(head, body)}</div>'
        if folded:
            shown = f"<details><summary>{_text(title)}</summary>{shown}</details>"
        elif title:
            shown = f"<h3>{_text(title)}</h3>{shown}"
        self._parts.append(f"<section>{shown}</section>")

    def matrix(self, title: str, values: np.ndarray, names: Sequence[str] = ()) -> None:
        """Add a table of counts, coloured by their share of the row; of at most 40 classes."""
        values, most = values[:40, :40], max(values.shape)
        names = [*names, *map(str, range(len(names), most))][:40]
        shares = values / np.maximum(np.abs(values).sum(1, keepdims=True), 1e-12)
        head = "".join(f"<th>{_text(name)}</th>" for name in names)
        rows = "".join(
            f"<tr><th>{_text(name)}</th>"
            + "".join(
                f'<td style="background:rgb(59 130 196/{abs(share):.2f})">{value:.4g}</td>'
                for value, share in zip(row, of_row, strict=True)
            )
            + "</tr>"
            for name, row, of_row in zip(names, values, shares, strict=False)
        )
        note = f"<p>The first 40 of {most:,} classes.</p>" if most > 40 else ""
        self._parts.append(
            f"<section><h3>{_text(title)}</h3><p>Rows are labels, columns are predictions; the colour "
            f'is the share of the row.</p>{note}<div class="wide matrix"><table><tr><th></th>{head}'
            f"</tr>{rows}</table></div></section>"
        )

    def chart(self, chart: Panel | ParallelCoordinates) -> None:
        """Add a chart, unless it has nothing to show."""
        if isinstance(chart, ParallelCoordinates) or any(
            len(line.thinned(2)) for line in chart.lines
        ):
            self._parts.append(chart)

    def save(self, path: str | Path) -> Path:
        """Write the page, and return its path."""
        path = Path(path)
        path.write_text(self.html(), encoding="utf-8")
        return path

    def html(self) -> str:
        """Return the page."""
        check_bokeh()
        from bokeh.document import Document
        from bokeh.embed.util import standalone_docs_json_and_render_items
        from bokeh.resources import Resources

        panels = [part for part in self._parts if isinstance(part, Panel)]
        count = sum(len(panel.lines) for panel in panels) or 1
        points = max(20, min(LINE_POINTS, PAGE_POINTS // count))
        document, ranges, body, inside = Document(), _ranges(panels), [], False
        for part in self._parts:
            if isinstance(part, str) == inside:
                inside = not inside
                body.append('<div class="charts">' if inside else "</div>")
            if isinstance(part, str):
                body.append(part)
                continue
            if isinstance(part, Panel):
                figure, head = _panel_figure(part, ranges[part.across], points)
                style = kind = ""
            else:
                figure, head = _parallel_figure(part), ""
                kind, style = "whole wide", f"min-width:{120 * (1 + len(part.names))}px"
            document.add_root(figure)
            body.append(
                f'<figure class="{kind}"><figcaption>{head}</figcaption>'
                f'<div style="{style}" id="{figure.id}" data-root-id="{figure.id}"></div></figure>'
            )
        body.append("</div>" if inside else "")
        script = ""
        if document.roots:
            documents, (item,) = standalone_docs_json_and_render_items(document.roots)
            places = {"roots": {root.id: root.id for root in document.roots}}
            data = json.dumps([documents, [item.to_json() | places]])
            bokeh = "\n".join(Resources(mode="inline", components=["bokeh"], minified=True).js_raw)
            script = (
                f"<script>{bokeh}</script>"
                f'<script type="application/json" id="charts">{_in_script(data)}</script>'
                f"<script>{_SCRIPT}</script>"
            )
        return (
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width,initial-scale=1">'
            f"<title>{_text(self.title)}</title><style>{_STYLE}</style></head>"
            f"<body><h1>{_text(self.title)}</h1>{''.join(body)}{script}</body></html>\n"
        )


def check_bokeh() -> None:
    """Raise :class:`ParameterError` if Bokeh is not installed."""
    optional_library("bokeh", "a report", "report")


def _text(text: str) -> str:
    return html.escape(without_credentials(str(text)))


def _in_script(data: str) -> str:
    """Return JSON in which nothing can end the element that holds it."""
    return data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _ranges(panels: Sequence[Panel]) -> dict[str, Any]:
    """Return the range of each horizontal axis, which panels share: they are zoomed together."""
    from bokeh.models import Range1d

    every: dict[str, list[np.ndarray]] = {}
    for panel in panels:
        every.setdefault(panel.across, []).extend(line.thinned(2)[:, 0] for line in panel.lines)
    ranges = {}
    for across, ends in every.items():
        low, high = float(np.concatenate(ends).min()), float(np.concatenate(ends).max())
        margin = 0.02 * (high - low) or 0.5
        ranges[across] = Range1d(low - margin, high + margin)
    return ranges


def _new_figure(height: int, **options: Any) -> Any:
    from bokeh.plotting import figure

    made = figure(
        height=height,
        sizing_mode="stretch_width",
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border=2,
        **options,
    )
    made.toolbar.logo = None
    made.toolbar.autohide = True
    made.grid.grid_line_color, made.grid.grid_line_alpha = _GRID, 0.5
    made.axis.axis_line_color = made.axis.major_tick_line_color = _GRID
    made.axis.minor_tick_line_color = None
    made.axis.major_label_text_color = made.axis.axis_label_text_color = _INK
    return made


def _panel_figure(panel: Panel, across: Any, points: int) -> tuple[Any, str]:
    """Return the figure of a panel, and its title with the keys of its lines as HTML."""
    from bokeh.models import HoverTool, NumeralTickFormatter, PlainText, Span

    figure = _new_figure(
        240,
        x_range=across,
        y_axis_type="log" if panel.log else "linear",
        tools="box_zoom,pan,wheel_zoom,reset,save",
        active_drag="box_zoom",
        active_scroll=None,
    )
    figure.xaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
    if panel.from_zero:
        figure.y_range.start = 0
    highest = max(float(line.thinned(2)[:, 1].max(initial=0.0)) for line in panel.lines)
    figure.y_range.default_span = 0.2 * abs(highest) or 1.0  # around lines that are constant
    unit = without_credentials(panel.across)
    figure.xaxis.axis_label = PlainText(**{"text": unit})  # a string may be taken for a formula
    keys = []
    for line in panel.lines:
        values = line.thinned(points)
        source = {"x": values[:, 0], "y": values[:, 1]}
        names = []
        if line.dots or len(values) == 1:
            names.append(figure.scatter("x", "y", source=source, size=6, color=line.colour))
        style = {
            "color": line.colour,
            "width": line.width,
            "alpha": 0.6 if line.width == 1 else 1.0,
        }
        if line.width:
            names.append(figure.line("x", "y", source=source, **style))
        label = line.name if line.name == panel.title else f"{panel.title}, {line.name}"
        figure.add_tools(
            HoverTool(
                renderers=names[:1],
                tooltips=[(without_credentials(label), "@y{%.6g}"), (unit, "@x{0,0.[00]}")],
                formatters={"@y": "printf"},
                mode="vline" if len(panel.lines) == 1 else "mouse",
                visible=False,
            )
        )
        keys.append(
            f'<button type="button" data-lines="{",".join(each.id for each in names)}">'
            f'<i style="background:{line.colour}"></i>{_text(line.name)}</button>'
        )
    for place in panel.marks:
        figure.add_layout(
            Span(location=place, dimension="height", line_color=_FAULT, line_dash="dashed")
        )
    named = [line.name for line in panel.lines] != [panel.title]
    shown = f'<span class="keys">{"".join(keys)}</span>' if named else ""
    return figure, _text(panel.title) + shown


def _parallel_figure(chart: ParallelCoordinates) -> Any:
    """Return the figure of parallel coordinates."""
    from bokeh.models import ColumnDataSource, HoverTool
    from bokeh.palettes import Viridis256

    names, count = [without_credentials(name) for name in chart.names], len(chart.names)
    figure = _new_figure(
        380, x_range=(-0.6, count - 0.6), y_range=(-0.08, 1.16), tools="reset,save"
    )
    figure.axis.visible = figure.grid.visible = False
    known = [shade for shade in chart.shades if math.isfinite(shade)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    colours = [
        Viridis256[20 + int(200 * (shade - low) / ((high - low) or 1))]
        if math.isfinite(shade)
        else _GRID
        for shade in chart.shades
    ]
    source = ColumnDataSource(
        {
            "xs": [[float(n) for n in range(count)] for _ in chart.places],
            "ys": [[float(place) for place in row] for row in chart.places],
            "colour": colours,
            "width": [4.0 if n == chart.best else 1.5 for n in range(len(chart.places))],
            **{f"t{n}": [without_credentials(row[n]) for row in chart.texts] for n in range(count)},
        }
    )
    lines = figure.multi_line("xs", "ys", color="colour", width="width", alpha=0.85, source=source)
    for n, ticks in enumerate(chart.ticks):
        figure.line([n, n], [0, 1], color=_INK, width=1)
        style = {"text_color": _INK, "text_font_size": "11px", "background_fill_color": _PAPER}
        figure.text([n], [1.06], [names[n]], text_align="center", **style)
        for place, label in ticks:
            figure.text(
                [n],
                [place],
                [without_credentials(label)],
                text_align="right",
                text_baseline="middle",
                x_offset=-5,
                **style,
            )
    tips = [(name, f"@t{n}") for n, name in enumerate(names)]
    figure.add_tools(HoverTool(renderers=[lines], tooltips=tips, visible=False))
    return figure


_STYLE = """
:root{color-scheme:light dark;--ink:#1d2530;--soft:#5b6673;--paper:#fff;--raised:#f4f6f8;--edge:#d9dee4}
@media(prefers-color-scheme:dark){:root{--ink:#e4e8ec;--soft:#9aa5b1;--paper:#14181d;--raised:#1e242b;
--edge:#343c46}}
body{margin:0 auto;max-width:1200px;padding:12px 16px 48px;background:var(--paper);color:var(--ink);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:1.5em;margin:.4em 0;overflow-wrap:anywhere}h2{font-size:1.15em;margin:1.8em 0 .4em;
border-bottom:1px solid var(--edge)}h3{font-size:1em;margin:1.1em 0 .3em}
p{margin:.3em 0;color:var(--soft);overflow-wrap:anywhere}p.alert{color:var(--ink);padding:6px 10px;
border-left:4px solid #d99a2b;background:var(--raised)}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(125px,1fr));gap:8px;margin:.8em 0}
.cards div{padding:8px 12px;overflow-wrap:anywhere;
background:var(--raised);border-radius:6px;font-size:.82em;color:var(--soft)}
.cards b{display:block;font-size:1.4em;color:var(--ink);white-space:nowrap}
.charts{display:grid;gap:12px;grid-template-columns:repeat(auto-fill,minmax(min(100%,480px),1fr))}
figure{margin:0;min-width:0}.whole{grid-column:1/-1}
figcaption{font-weight:600;font-size:.92em;margin:.4em 0}
.keys{display:inline-flex;flex-wrap:wrap;margin-left:8px}.keys button{all:unset;cursor:pointer;
font-weight:400;font-size:.9em;margin-right:12px;overflow-wrap:anywhere}
.keys button:focus-visible{outline:2px solid #3b82c4}
.keys i{display:inline-block;width:14px;height:4px;border-radius:2px;margin-right:5px;
vertical-align:middle}.keys .off{opacity:.35}
section{display:inline-block;vertical-align:top;max-width:100%}
@media(min-width:700px){section{margin-right:48px}}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.88em}
td,th{padding:3px 14px 3px 0;border-bottom:1px solid var(--edge);vertical-align:top;font-weight:400}
th{color:var(--soft)}td,th{overflow-wrap:break-word;max-width:60ch}
.matrix td,.matrix th{padding:4px 8px;text-align:right;border:0}
pre{background:var(--raised);padding:10px;border-radius:6px;overflow-x:auto;font-size:.88em}
summary{cursor:pointer;margin:.8em 0}
"""
_SCRIPT = (
    """
const dark=matchMedia("(prefers-color-scheme: dark)");
const text=document.getElementById("charts").textContent;
const [documents,items]=JSON.parse(dark.matches
?text.replaceAll("INK","#a9b3bd").replaceAll("GRID","#46505b").replaceAll("PAPER","#14181d")
:text.replaceAll("INK","#4b5560").replaceAll("GRID","#ccd3da").replaceAll("PAPER","#ffffff"));
dark.addEventListener("change",()=>location.reload());
Bokeh.embed.embed_items(documents,items).then(()=>{
const models=new Map(Bokeh.documents.flatMap(d=>[...d.all_models]).map(m=>[m.id,m]));
if(matchMedia("(pointer: coarse)").matches)
for(const m of models.values())if(m.type==="BoxZoomTool")m.active=false;
for(const key of document.querySelectorAll(".keys button"))key.onclick=()=>{
const off=key.classList.toggle("off");
for(const id of key.dataset.lines.split(","))models.get(id).visible=!off;};
});
""".replace("INK", _INK)
    .replace("GRID", _GRID)
    .replace("PAPER", _PAPER)
)
