"""What a picture shows, as text that a person can review."""

from __future__ import annotations

from matplotlib.collections import LineCollection, QuadMesh
from matplotlib.patches import PathPatch
from matplotlib.ticker import FixedLocator


def described(figure):
    """Return a line for each thing that a reader of the picture sees, panel by panel."""
    lines = [f"picture: {figure.get_suptitle()!r}"]
    for axes in figure.axes:
        titles = [axes.get_title(where) for where in ("left", "center", "right")]
        labels = [axes.get_xlabel(), axes.get_ylabel()]
        lines.append(f"panel: {[words for words in titles + labels if words]}")
        lines += [f"  line {it.get_label()!r}: {_points(it.get_xydata())}" for it in axes.lines]
        lines += [f"  {_shape(it)}" for it in axes.patches]
        lines += [f"  {told}" for told in map(_collection, axes.collections) if told]
        lines += [
            f"  words {it.get_text()!r} at {_points([it.get_position()])}" for it in axes.texts
        ]
        lines += [f"  names {_names(it)}" for it in (axes.xaxis, axes.yaxis) if _names(it)]
    legends = [axes.get_legend() for axes in figure.axes if axes.get_legend()] + figure.legends
    lines += [f"legend: {[text.get_text() for text in it.get_texts()]}" for it in legends]
    return "\n".join(lines) + "\n"


def _names(axis):
    """Return the labels of an axis that the picture chose, and not matplotlib."""
    is_chosen = isinstance(axis.get_major_locator(), FixedLocator)
    return [label.get_text() for label in axis.get_ticklabels()] if is_chosen else []


def _points(points):
    return " ".join(f"({x:.4g}, {y:.4g})" for x, y in points)


def _collection(each):
    """Describe scattered points, the numbers of a mesh, or lines around its cells."""
    if each.get_offsets().any():
        return f"points {_points(each.get_offsets())}"
    if isinstance(each, QuadMesh) and each.get_array().shape[1] > 1:  # else a bar of colours
        return f"mesh {[[round(float(it), 4) for it in row] for row in each.get_array()]}"
    if type(each) is LineCollection:
        return f"outline of {len(each.get_segments())} sides"
    return ""


def _shape(patch):
    if isinstance(patch, PathPatch):
        return f"hatch over {_points(patch.get_path().get_extents().get_points())}"
    kind = "hollow bar" if patch.get_facecolor()[:3] == (1, 1, 1) else "bar"
    middle = (patch.get_x() + patch.get_width() / 2, patch.get_y() + patch.get_height() / 2)
    size = (patch.get_width(), patch.get_height())
    return f"{kind} of {_points([size])} around {_points([middle])}"
