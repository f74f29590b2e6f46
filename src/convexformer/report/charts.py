"""Vega-Lite specifications. Colours are CSS variables of the page, so that light, dark and print need no second drawing.

User strings are values of the fixed fields below, never names of fields and never parts of an expression.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INK, MUTED, RULE = "var(--ink)", "var(--muted)", "var(--rule)"
FIRST, SECOND, GOOD, BAD = "var(--first)", "var(--second)", "var(--good)", "var(--bad)"

Rows = Sequence[dict[str, Any]]
Spec = dict[str, Any]


def chart(rows: Rows, layers: Sequence[Spec], height: int, *, at: int | None = None) -> Spec:
    """Return layers over common rows; ``at`` adds the parameter that the slider moves."""
    spec: Spec = {"data": {"values": list(rows)}, "width": "container", "height": height, "layer": list(layers)}
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    if at is not None:
        spec["params"] = [{"name": "at", "value": at}]
    return spec


def axis(title: str, field: str, *, kind: str = "quantitative", **options: Any) -> Spec:
    """Return the encoding of an axis; options of the scale are passed as ``scale``, of the axis as ``axis``."""
    return {"field": field, "type": kind, "title": title, **options}


def log_axis(title: str, field: str, *, grid: bool = True, **scale: Any) -> Spec:
    """Return a logarithmic axis, with few labels."""
    ticks: Spec = {"tickCount": 5, "format": "~g", **({} if grid else {"grid": False})}
    return axis(title, field, scale={"type": "log", "nice": False, **scale}, axis=ticks)


def hint(**fields: str) -> list[Spec]:
    """Return the tooltip: titles by field; numbers are shortened."""
    return [{"field": field, "title": title} for field, title in fields.items()]


def line(x: Spec, y: Spec, colour: str, points: bool, **mark: Any) -> Spec:
    """Return a line, with points where there are few of them."""
    point: bool | Spec = {"filled": True, "fill": colour, "stroke": colour, "size": 28} if points else False
    return {"mark": {"type": "line", "stroke": colour, "point": point, **mark}, "encoding": {"x": x, "y": y}}


def named_lines(x: Spec, ys: dict[str, Spec], points: bool) -> list[Spec]:
    """Return a line for each name, with a legend; the second is dashed, so that colour is not all that tells them apart."""
    scale = {"domain": list(ys), "range": [FIRST, SECOND][: len(ys)]}
    layers = []
    for k, (name, y) in enumerate(ys.items()):
        point: bool | Spec = {"filled": True, "size": 28} if points else False
        mark: Spec = {"type": "line", "point": point, **({"strokeDash": [6, 3]} if k else {})}
        legend = {"orient": "top", "title": None, "symbolType": "stroke", "symbolStrokeWidth": 3, "offset": 4}
        layers.append(
            {"mark": mark, "encoding": {"x": x, "y": y, "color": {"datum": name, "scale": scale, "legend": legend}}}
        )
    return layers


def bars(rows: Rows, title: str, colour: str = FIRST) -> Spec:
    """Return horizontal bars of ``value`` by ``name``, in the order of the rows."""
    name = axis("", "name", kind="nominal", sort=None, axis={"labelLimit": 220, "ticks": False, "domain": False})
    mark = {"type": "bar", "fill": colour, "cornerRadiusEnd": 2, "height": {"band": 0.7}}
    encoding = {"y": name, "x": axis(title, "value", axis={"tickCount": 6}), "tooltip": hint(name="", value=title)}
    return chart(rows, [{"mark": mark, "encoding": encoding}], 24 * len(rows))


def heat_map(rows: Rows, shape: tuple[int, int], title: str, *, at: int | None = None) -> Spec:
    """Return cells ``row, col, value``, stronger where ``value`` is larger; ``at`` shows the cells of that ``k``."""
    place: Spec = {"axis": None, "type": "ordinal"}
    encoding = {
        "x": {"field": "col", **place},
        "y": {"field": "row", **place},
        "fillOpacity": {
            "field": "value",
            "type": "quantitative",
            "legend": None,
            "scale": {"domainMin": 0, "range": [0.04, 1]},
        },
        "tooltip": hint(token="token", value=title),
    }
    height = round(min(300, 300 * shape[0] / shape[1]))
    spec = chart(rows, [{"mark": {"type": "rect", "fill": FIRST, "stroke": RULE, "strokeWidth": 0.5}}], height, at=at)
    spec["encoding"] = encoding
    if at is not None:
        spec["transform"] = [{"filter": "datum.k === at"}]
    return {**spec, "width": round(height * shape[1] / shape[0]), "autosize": "pad"}


def confusion(rows: Rows, classes: Sequence[str], numbers: bool) -> Spec:
    """Return the confusion matrix of ``true, predicted, share, count``: opacity is the share of the row."""
    side: Spec = {"type": "nominal", "sort": list(range(len(classes))), "scale": {"paddingInner": 0.04}}
    names: Spec = {"labelExpr": "names[datum.value]", "labelLimit": 90, "ticks": False, "domain": False}
    tilt = -40 if max(map(len, classes)) > 3 else 0
    encoding = {
        "x": {"field": "predicted", "title": "predicted", **side, "axis": {**names, "labelAngle": tilt}},
        "y": {"field": "true", "title": "true", **side, "axis": names},
        "tooltip": hint(name="true", other="predicted", count="samples"),
    }
    cell = {
        "mark": {"type": "rect", "fill": {"expr": f"datum.true === datum.predicted ? '{GOOD}' : '{BAD}'"}},
        "encoding": {
            "fillOpacity": {
                "field": "share",
                "type": "quantitative",
                "legend": None,
                "scale": {"type": "sqrt", "domain": [0, 1], "range": [0, 0.9]},
            }
        },
    }
    text = {
        "mark": {"type": "text", "fontSize": 11},
        "encoding": {
            "text": {"field": "count"},
            "fill": {
                "condition": {"test": "datum.share > 0.45", "value": "var(--paper)"},
                "value": INK,
            },
            "opacity": {"condition": {"test": "datum.count === 0", "value": 0}, "value": 1},
        },
    }
    size = min(560, max(200, 44 * len(classes)))
    spec = chart(rows, [cell, text] if numbers else [cell], size)
    spec["encoding"] = encoding
    spec["params"] = [{"name": "names", "value": list(classes)}]
    return {**spec, "width": size, "autosize": "pad", "view": {"fill": "var(--wash)"}}


CONFIG: Spec = {
    "background": "transparent",
    "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": MUTED,
        "titleColor": MUTED,
        "titleFontWeight": 500,
        "labelFontSize": 12,
        "titleFontSize": 12,
        "titlePadding": 8,
        "gridColor": RULE,
        "domainColor": RULE,
        "tickColor": RULE,
    },
    "legend": {"labelColor": INK, "titleColor": MUTED, "labelFontSize": 12, "symbolType": "circle"},
    "text": {"fill": INK},
    "line": {"strokeWidth": 2, "strokeCap": "round"},
}
