"""A figure's rows -> SVG, drawn with Vega-Lite by vl-convert; one function for each kind of chart.

The rows are also the table that stands under the chart, so its fields are headings with units. The
drawing is static: it opens at once, prints, and needs no script. Colours are the page's CSS
variables, so that one drawing serves light, dark and print.
"""

import re
from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any, TypeAlias

Row: TypeAlias = Mapping[str, str | int | float | None]
Spec: TypeAlias = dict[str, Any]

ACCURACY, LOW, HIGH, CHANCE = "accuracy (%)", "95 % low (%)", "95 % high (%)", "chance (%)"
CONFIDENCE = "mean confidence (%)"
LATENCY, WITHIN = "latency (ms)", "answered within (%)"
TOKENS, QUARTILES, FIT = "prompt length (tokens)", ("p25 (ms)", "p50 (ms)", "p75 (ms)"), "fit (ms)"
DONE, SLOWER = "done (%)", "latency over expected"
CHART_ONLY = ("number", "alike")  # fields that say how to draw a row, not what is in it

N_COLORS = 8  # --run-1 to --run-8 in the page's style; further runs take them again
# Vega's name of a shape -> the sign that stands for it in the page's legends.
SHAPES = {
    "circle": "●",
    "square": "■",
    "triangle-up": "▲",
    "diamond": "◆",
    "cross": "✚",
    "triangle-down": "▼",
    "triangle-left": "◀",
}
PANEL_TITLE = 30  # characters a line
MAX_TEXT = 64  # characters: a run's label and its number, and all of our own
MAX_PARTS = 100  # of a slice, ArabicMMLU having 40 tasks: nobody reads a drawing of more

# What XML has no place for, on which vl-convert ends the whole process, and what Vega's own
# expressions take for the end of a line.
UNDRAWABLE = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff\u2028\u2029]")
INK, FAINT = "var(--ink)", "var(--faint)"
REFERENCE: Spec = {"strokeDash": [5, 4], "color": FAINT, "aria": False}
POINT: Spec = {"type": "point", "filled": True, "opacity": 1}
INTERVAL: Spec = {"type": "rule", "strokeWidth": 1.5}
PERCENT: Spec = {"domain": [0, 100]}

CONFIG: Spec = {
    "font": "system-ui, sans-serif",
    "background": "transparent",
    "view": {"stroke": None},
    "axis": {
        "labelColor": INK,
        "titleColor": INK,
        "titleFontWeight": "normal",
        "labelFontSize": 12,
        "titleFontSize": 12,
        "labelLimit": 0,  # Vega would cut in the middle of a character; _drawable() does not
        "domainColor": FAINT,
        "tickColor": FAINT,
        "gridColor": "var(--grid)",
    },
    "legend": {"orient": "bottom", "labelColor": INK, "labelFontSize": 12, "title": None},
    "title": {"color": INK, "fontSize": 12, "fontWeight": "normal", "anchor": "start"},
}


def trade_off(rows: Sequence[Row], cost: str) -> str | None:
    """Accuracy with its interval against a cost, and a step line along each Pareto front."""
    x, near = _quantity(cost, _from_zero_or_log(rows, cost)), {"zero": False}
    front = {"filter": "datum['on the front'] == 'yes'"}
    return _draw(
        rows,
        width=460,
        height=280,
        layer=[
            {
                "transform": [front],
                "mark": {"type": "line", "interpolate": "step-after", "color": FAINT},
                "encoding": {"x": x, "y": _quantity(ACCURACY, near), "detail": {"field": "alike"}},
            },
            _interval(rows, x, near),
            _points(rows, x, _quantity(ACCURACY, near), 110),
        ],
    )


def intervals(rows: Sequence[Row], part: str, ceiling: float) -> str | None:
    """Accuracy of each part and run with its interval, ticks at chance, a line at the ceiling.

    None where there are more parts than MAX_PARTS.
    """
    if len({row[part] for row in rows}) > MAX_PARTS:
        return None
    place: Spec = {
        "y": {"field": part, "type": "nominal", "sort": None, "title": None},
        "yOffset": {"field": "run", "sort": None},
    }
    low, value, chance = (_quantity(field, PERCENT, ACCURACY) for field in (LOW, ACCURACY, CHANCE))
    run = {**place, "color": _colors(rows)}
    return _draw(
        rows,
        width=520,
        height={"step": 13},
        layer=[
            {
                "mark": {"type": "tick", "thickness": 2, "size": 11, "color": FAINT},
                "encoding": {**place, "x": chance},
            },
            {"mark": INTERVAL, "encoding": {**run, "x": low, "x2": {"field": HIGH}}},
            {
                "mark": {**POINT, "size": 50},
                "encoding": {**run, "x": value, "shape": _shapes(rows)},
            },
            {
                "mark": {"type": "rule", **REFERENCE},
                "encoding": {"x": {"datum": ceiling, "type": "quantitative"}},
            },
        ],
    )


def letters(rows: Sequence[Row]) -> str | None:
    """How often each letter was chosen and how often it was right, one panel a run."""
    kinds, share = ["chosen (%)", "right (%)"], "of the questions (%)"
    axis = {"labelAngle": 0, "labelFontSize": 14}
    letter = {"field": "letter", "type": "nominal", "sort": None, "title": None, "axis": axis}
    colors = {"domain": kinds, "range": ["var(--run-1)", FAINT]}
    panel: Spec = {
        "transform": [{"fold": kinds, "as": ["kind", share]}],
        "width": 200,
        "height": 130,
        "mark": "bar",
        "encoding": {
            "x": letter,
            "xOffset": {"field": "kind", "type": "nominal", "sort": kinds},
            "y": _quantity(share),
            "color": {"field": "kind", "type": "nominal", "scale": colors},
        },
    }
    return _draw_panels(rows, panel)


def reliability(rows: Sequence[Row]) -> str | None:
    """Accuracy against confidence, one panel a run; a calibrated run lies on the diagonal."""
    x, y = _quantity(CONFIDENCE, PERCENT), _quantity(ACCURACY, PERCENT)
    diagonal: Spec = {
        "data": {"values": [{CONFIDENCE: end, ACCURACY: end} for end in (0, 100)]},
        "mark": {"type": "line", **REFERENCE},
        "encoding": {"x": x, "y": y},
    }
    marks = [diagonal, _interval(rows, x, PERCENT), _points(rows, x, y, 60)]
    return _draw_panels(rows, {"width": 200, "height": 180, "layer": marks})


def cumulative(rows: Sequence[Row]) -> str | None:
    """The share of the questions that were answered within a time."""
    x, y = _quantity(LATENCY, _from_zero_or_log(rows, LATENCY)), _quantity(WITHIN, PERCENT)
    return _draw(
        rows,
        width=460,
        height=240,
        layer=[_line(rows, x, y, order=WITHIN, interpolate="step-after", strokeWidth=2)],
    )


def by_length(rows: Sequence[Row]) -> str | None:
    """Latency against the prompt's tokens: median and middle half of each bin, and the fit."""
    x, (low, middle, high) = _quantity(TOKENS), QUARTILES
    return _draw(
        rows,
        width=460,
        height=260,
        layer=[
            _line(rows, x, _quantity(FIT, title=LATENCY), strokeWidth=1, strokeDash=[5, 3]),
            {
                "mark": INTERVAL,
                "encoding": {"x": x, "y": _quantity(low, title=LATENCY), "y2": {"field": high}}
                | {"color": _colors(rows)},
            },
            _points(rows, x, _quantity(middle, title=LATENCY), 45),
        ],
    )


def drift(rows: Sequence[Row]) -> str | None:
    """Latency over what the fit expects, through the run: above 1 it was slower."""
    y = _quantity(SLOWER, {"zero": False})
    return _draw(
        rows,
        width=460,
        height=200,
        layer=[
            {"mark": {"type": "rule", **REFERENCE}, "encoding": {"y": {"datum": 1}}},
            _line(rows, _quantity(DONE, PERCENT), y, strokeWidth=1.5, point=True),
        ],
    )


def can_draw() -> bool:
    """Whether vl-convert, of the extra `report`, is installed; without it there are only tables."""
    try:
        import vl_convert  # noqa: F401
    except ImportError:
        return False
    return True


def _draw(rows: Sequence[Row], **spec: Any) -> str | None:
    if not rows or not can_draw():
        return None
    from vl_convert import vegalite_to_svg

    svg: str = vegalite_to_svg(_drawable({"config": CONFIG, "data": {"values": rows}, **spec}))
    return svg


def _drawable(value: Any) -> Any:
    """The same with every text short, and without what cannot be drawn: each costs its length."""
    if isinstance(value, Mapping):
        return {name: _drawable(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_drawable(inner) for inner in value]
    if not isinstance(value, str):
        return value
    text = value if len(value) <= MAX_TEXT else f"{value[: MAX_TEXT - 1]}…"
    return UNDRAWABLE.sub(" ", text)


def _draw_panels(rows: Sequence[Row], panel: Spec) -> str | None:
    """The same chart for each run, side by side under the run's name."""
    panels = [
        {
            "title": {"text": wrap(str(run), PANEL_TITLE)},
            "data": {"values": [row for row in rows if row["run"] == run]},
            **panel,
        }
        for run in dict.fromkeys(row["run"] for row in rows)
    ]
    return _draw(rows, concat=panels, columns=4 if len(panels) % 3 == 1 else 3)


def _quantity(field: str, scale: Spec | None = None, title: str | None = None) -> Spec:
    axis = {"title": title or field, "scale": scale or {}}
    return {"field": field, "type": "quantitative", **axis}


def _line(rows: Sequence[Row], x: Spec, y: Spec, *, order: str = "", **mark: Any) -> Spec:
    encoding = {"x": x, "y": y, "color": _colors(rows)}
    along = {"order": {"field": order, "type": "quantitative"}} if order else {}
    return {"mark": {"type": "line", **mark}, "encoding": encoding | along}


def _points(rows: Sequence[Row], x: Spec, y: Spec, size: int) -> Spec:
    encoding = {"x": x, "y": y, "color": _colors(rows), "shape": _shapes(rows)}
    return {"mark": {**POINT, "size": size}, "encoding": encoding}


def _interval(rows: Sequence[Row], x: Spec, scale: Spec) -> Spec:
    ends = {"y": _quantity(LOW, scale, ACCURACY), "y2": {"field": HIGH}}
    return {"mark": INTERVAL, "encoding": {"x": x, **ends, "color": _colors(rows)}}


def _colors(rows: Sequence[Row]) -> Spec:
    return _by_run(rows, [f"var(--run-{n})" for n in range(1, N_COLORS + 1)])


def _shapes(rows: Sequence[Row]) -> Spec:
    return _by_run(rows, list(SHAPES))


def _by_run(rows: Sequence[Row], looks: Sequence[str]) -> Spec:
    # By number and not by place: a run that one chart leaves out looks the same in all others.
    numbers = {row["run"]: int(row["number"] or 0) for row in rows}
    looked = [looks[(number - 1) % len(looks)] for number in numbers.values()]
    scale = {"domain": list(numbers), "range": looked}
    return {"field": "run", "type": "nominal", "scale": scale, "legend": None}


def _from_zero_or_log(rows: Sequence[Row], field: str) -> Spec:
    """From zero, but logarithmic where the costs differ by more than ten times."""
    values = [float(row[field] or 0) for row in rows]
    return {"type": "log"} if values and 0 < 10 * min(values) < max(values) else {"zero": True}
