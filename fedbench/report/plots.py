"""Kinds of plots as plain data, and how they are drawn: the same data give the same bytes.

Colours are Okabe and Ito's, which people with colour blindness can tell apart; lines also differ in dashes and markers.
"""

import io
import math
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

INK, RULE = "#1b1c1e", "#d4d5d6"
"""Text and lines, and what stands behind them; inside a page they take the page's colours."""

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)))
_MARKERS = "os^Dv<>P"
CONTROL_LOOK = -1
"""The look of the control: ink, dashed."""

_WIDTH = 4.4  # inches: as wide as a phone, so that text is not scaled down there
_FEW = 400  # values up to which each is shown as a point
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.parse_math": False,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.use_mathtext": False,
    "axes.unicode_minus": True,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "grid.color": RULE,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedbench",
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
    "figure.dpi": 72,
}


class Plot(ABC):
    """What one pair of axes shows."""

    height: ClassVar[float] = 2.5

    @property
    def inches(self) -> float:
        """Height of the axes."""
        return self.height

    @abstractmethod
    def draw(self, axes: "Axes", /) -> None:
        """Draw into axes without a legend."""


@final
@dataclass(frozen=True)
class Figure:
    """A plot with its words.

    - `name`: of the file, unique in a report; `section`: heading under which it stands.
    - `caption`: what to see; `alt`: the same for those who see no figure, with the numbers that matter.
    """

    name: str
    section: str
    title: str
    caption: str
    alt: str
    plot: Plot


# --- kinds


@dataclass(frozen=True)
class Line:
    """Points in order, with a band around them unless it is empty.

    `look` is a number from 0, or `CONTROL_LOOK`.
    """

    label: str
    look: int
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class Level:
    """A horizontal line: what does not depend on x."""

    label: str
    look: int
    y: float


@final
@dataclass(frozen=True)
class Lines(Plot):
    """Curves over a numeric axis, logarithmic if `log`; with `dots`, each point is marked.

    `ticks` are names for x = 0, 1, ...
    """

    x_name: str
    y_name: str
    lines: tuple[Line, ...]
    levels: tuple[Level, ...] = ()
    log: bool = False
    dots: bool = False
    ticks: tuple[str, ...] = ()

    def draw(self, axes: "Axes", /) -> None:
        """Draw curves, bands and levels."""
        from matplotlib.ticker import MaxNLocator

        for level in self.levels:
            axes.axhline(level.y, label=_short(level.label), alpha=0.8, **_look(level.look, marker=False))
        for number, line in enumerate(self.lines):
            look = _look(line.look)
            every = 1 if self.dots else max(1, len(line.x) // 5)
            axes.plot(line.x, line.y, label=_short(line.label), markevery=(number % every, every), **look)
            if line.low:
                axes.fill_between(line.x, line.low, line.high, color=look["color"], alpha=0.15, linewidth=0)
        if self.log:
            _logarithmic(axes)
        elif all(float(x).is_integer() for line in self.lines for x in line.x):
            axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
        if self.ticks:
            axes.set_xticks(range(len(self.ticks)), [_short(tick, 16) for tick in self.ticks])
        axes.set_xlabel(self.x_name)
        axes.set_ylabel(self.y_name)
        axes.grid()


@final
@dataclass(frozen=True)
class Strip(Plot):
    """One point per value in a row for each label, with the middle half and the mean."""

    x_name: str
    rows: tuple[tuple[str, tuple[float, ...]], ...]

    @property
    def inches(self) -> float:
        """Height of the axes: by rows."""
        return 0.5 + 0.3 * len(self.rows)

    def draw(self, axes: "Axes", /) -> None:
        """Draw points, a bar from the first to the third quartile, and a tick at the mean."""
        for place, (_, values) in enumerate(self.rows):
            colour = _COLOURS[0]
            low, first, third, high = np.quantile(values, (0, 0.25, 0.75, 1))
            axes.plot([low, high], [place, place], color=INK, linewidth=0.6)
            axes.plot([first, third], [place, place], color=RULE, linewidth=9, solid_capstyle="butt", zorder=1)
            if len(values) <= _FEW:
                spread = place + 0.5 * ((np.arange(len(values)) * 0.618034) % 1 - 0.5)
                axes.plot(np.sort(values), spread, "o", color=colour, markersize=3, alpha=0.65, markeredgewidth=0)
            mean = float(np.mean(values))
            axes.plot([mean, mean], [place - 0.38, place + 0.38], color=_COLOURS[1], linewidth=2)
        _named_rows(axes, [label for label, _ in self.rows])
        axes.set_xlabel(self.x_name)


@final
@dataclass(frozen=True)
class Ranges(Plot):
    """Two numbers for each label on a logarithmic axis; what is zero is not on it."""

    x_name: str
    words: tuple[str, str]
    rows: tuple[tuple[str, float, float], ...]

    @property
    def inches(self) -> float:
        """Height of the axes: by rows."""
        return 0.5 + 0.3 * len(self.rows)

    def draw(self, axes: "Axes", /) -> None:
        """Draw both as triangles and write them beside; a row without either says "nothing"."""
        positive = [value for _, up, down in self.rows for value in (up, down) if value > 0] or [1.0]
        low, high = min(positive) / 3, max(positive) * 3
        for column, (marker, colour) in enumerate((("^", _COLOURS[0]), ("v", _COLOURS[1]))):
            shown = [(pair[column], y) for y, (_, *pair) in enumerate(self.rows) if pair[column] > 0]
            offset = -0.1 + 0.2 * column
            axes.plot(
                [x for x, _ in shown],
                [y + offset for _, y in shown],
                marker,
                color=colour,
                markersize=6,
                label=self.words[column],
            )
        for y, (_, first, second) in enumerate(self.rows):
            if first <= 0 and second <= 0:
                axes.annotate("nothing", (low, y), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
        _logarithmic(axes)
        axes.set_xlim(low, high)
        _named_rows(axes, [f"{_short(label, 20)}  {_pair(first, second)}" for label, first, second in self.rows])
        axes.set_xlabel(self.x_name)


@final
@dataclass(frozen=True)
class Heat(Plot):
    """A number for each row and column; NaN leaves a place blank.

    Where there are few places, the numbers are written into them.  The scale begins at `start`, or at the lowest.
    """

    x_name: str
    y_name: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    value_name: str
    digits: int = 0
    start: float | None = None

    @property
    def inches(self) -> float:
        """Height of the axes: by rows, to a limit."""
        return min(max(0.9, 0.19 * len(self.rows)), 6.0)

    def draw(self, axes: "Axes", /) -> None:
        """Draw the places, a scale, and the numbers if there is room."""
        values = np.array(self.values)
        shown: Any
        if values.size <= 4000:
            edges = np.arange(values.shape[1] + 1) - 0.5, np.arange(values.shape[0] + 1) - 0.5
            shown = axes.pcolormesh(*edges, values, cmap="cividis", vmin=self.start, snap=True)
            axes.invert_yaxis()
        else:
            shown = axes.imshow(values, cmap="cividis", vmin=self.start, aspect="auto", interpolation="none")
        bar = axes.figure.colorbar(shown, ax=axes, fraction=0.05, pad=0.02, label=self.value_name)
        bar.outline.set_visible(False)
        if len(self.columns) <= 20 and len(self.rows) <= 40:
            for (row, column), value in np.ndenumerate(values):
                if not math.isnan(value):
                    colour = "#ffffff" if shown.norm(value) < 0.55 else "#000000"
                    written = f"{value:.{self.digits}f}"
                    axes.text(column, row, written, ha="center", va="center", fontsize=6.5, color=colour)
        _ticks(axes.xaxis, self.columns, 24)
        _ticks(axes.yaxis, self.rows, 40)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel(self.x_name)
        axes.set_ylabel(self.y_name)


@final
@dataclass(frozen=True)
class Ranks(Plot):
    """Mean ranks, the best first, and which of them are not distinguishable."""

    rows: tuple[tuple[str, float], ...]
    groups: tuple[tuple[str, ...], ...]

    @property
    def inches(self) -> float:
        """Height of the axes: by rows and groups."""
        return 0.5 + 0.24 * len(self.rows) + 0.12 * len(self.groups)

    def draw(self, axes: "Axes", /) -> None:
        """Draw a point for each row, and beneath them a thick line for each group."""
        ranks = dict(self.rows)
        end = len(self.rows) - 0.4 + 0.5 * len(self.groups)
        for place, (_, rank) in enumerate(self.rows):
            axes.plot([rank, rank], [place, end], color=RULE, linewidth=0.8, zorder=1)
            axes.plot([rank], [place], "o", color=_COLOURS[0], markersize=6)
        for place, group in enumerate(self.groups):
            y = len(self.rows) - 0.4 + 0.5 * place
            axes.plot([ranks[group[0]], ranks[group[-1]]], [y, y], color=INK, linewidth=3, solid_capstyle="round")
        _named_rows(axes, [label for label, _ in self.rows])
        axes.set_ylim(end + 0.3, -0.6)
        axes.set_xlabel("mean rank (1 is the best)")


@dataclass(frozen=True)
class Group:
    """Points of one colour and marker."""

    label: str
    look: int
    points: tuple[tuple[float, float], ...]


@final
@dataclass(frozen=True)
class Scatter(Plot):
    """Points in a plane whose axes mean nothing, and a few `large` ones on top."""

    height = 3.9

    groups: tuple[Group, ...]
    large: tuple[Group, ...] = ()

    def draw(self, axes: "Axes", /) -> None:
        """Draw all points as one picture, since there are many."""
        for group in self.groups:
            x, y = zip(*group.points, strict=True)
            look = _look(group.look)
            (points,) = axes.plot(
                x, y, look["marker"], color=look["color"], markersize=2.5, alpha=0.4, markeredgewidth=0
            )
            points.set_rasterized(True)
            if len(self.groups) <= 12:
                axes.plot([], [], look["marker"], color=look["color"], label=_short(group.label, 16))
        for group in self.large:
            x, y = zip(*group.points, strict=True)
            look = _look(group.look)
            axes.plot(x, y, look["marker"], color=look["color"], markersize=9, markeredgecolor=INK, markeredgewidth=1.2)
        axes.set_xticks([])
        axes.set_yticks([])


# --- drawn


def svg(figure: Figure) -> str:
    """Return the figure as an SVG file, on white."""
    with _drawn(figure.plot, "#ffffff") as canvas:
        return _saved(canvas, "svg").decode()


def pdf(figure: Figure) -> bytes:
    """Return the figure as a PDF file, its text as text."""
    with _drawn(figure.plot, "#ffffff") as canvas:
        return _saved(canvas, "pdf")


def inline(figure: Figure) -> str:
    """Return the figure as an `svg` element without role or name: in the page's font and colours, ids its own."""
    with _drawn(figure.plot, "none") as canvas:
        text = _saved(canvas, "svg").decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*|<defs>\s*<style.*?</style>\s*</defs>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", text, count=1)
    text = text.replace("xlink:href", "href").replace("'DejaVu Sans', sans-serif", "system-ui, sans-serif")
    text = text.replace(INK, "currentColor").replace(RULE, "var(--rule)")
    text = re.sub(r'(?<= d=")[^"]*', lambda path: _rounded(path[0]), text)
    used = {*re.findall(r"url\(#([^)]+)\)", text), *re.findall(r'href="#([^"]+)"', text)}
    text = re.sub(r' id="([^"]*)"', lambda m: f' id="{figure.name}-{m[1]}"' if m[1] in used else "", text)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{figure.name}-", text).strip()


def _rounded(path: str) -> str:
    return re.sub(r"(\.\d\d)\d+", r"\1", " ".join(path.split()))


@contextmanager
def _drawn(plot: Plot, ground: str) -> Iterator["Canvas"]:
    """Give the canvas with a plot and, if anything has a label, a legend beneath; nobody's settings enter."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a browser has other fonts
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        canvas = Canvas(layout="constrained", facecolor=ground)
        axes = canvas.add_subplot(facecolor="none")
        plot.draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        lines = 0
        if labels:
            columns = max(1, min(4, len(labels), int(54 // (max(map(len, labels)) + 6))))
            lines = math.ceil(len(labels) / columns)
            canvas.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=2.4)
        canvas.set_size_inches(_WIDTH, plot.inches + 0.55 + 0.18 * lines)
        yield canvas


def _saved(canvas: "Canvas", kind: str) -> bytes:
    nobody = {
        "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
        "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    }
    stream = io.BytesIO()
    canvas.savefig(stream, format=kind, metadata=nobody[kind])
    return stream.getvalue()


def _look(number: int, marker: bool = True) -> dict[str, Any]:
    if number == CONTROL_LOOK:
        look: dict[str, Any] = {"color": INK, "linestyle": (0, (4, 2)), "marker": "x"}
    else:
        look = {
            "color": _COLOURS[number % len(_COLOURS)],
            "linestyle": _DASHES[number // len(_COLOURS) % len(_DASHES)],
            "marker": _MARKERS[number % len(_MARKERS)],
        }
    return look if marker else {**look, "marker": ""}


def _logarithmic(axes: "Axes") -> None:
    """Make the x axis logarithmic, its numbers written as plain text."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _named_rows(axes: "Axes", labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), [_short(label, 40) for label in labels])
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    axes.set_axisbelow(True)


def _ticks(axis: Any, labels: Sequence[str], most: int) -> None:
    step = max(1, math.ceil(len(labels) / most))
    places = range(0, len(labels), step)
    axis.set_ticks(list(places), [_short(labels[place], 24) for place in places])


def _short(text: str, most: int = 32) -> str:
    """Return text that fits; a line of a legend never begins with an underscore, which would hide it."""
    text = " ".join(text.split())
    text = text if len(text) <= most else f"{text[: most - 1]}…"
    return f"\u200b{text}" if text.startswith("_") else text


def compact(value: float) -> str:
    """Return a count in three digits: 436800 is 437k."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _pair(first: float, second: float) -> str:
    return "" if first <= 0 and second <= 0 else f"{compact(first)} ↑ {compact(second)} ↓"
