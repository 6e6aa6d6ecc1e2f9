"""Numbers as text: accuracies in percent, everything else as it is; nothing for NaN."""

import math

from fedbench.metrics import is_percentage


def named(metric: str) -> str:
    """Return a metric's name with its unit."""
    return metric + (" (%)" if is_percentage(metric) else "")


def plain(value: float, digits: int) -> str:
    """Return a number with so many digits behind the point."""
    return "" if math.isnan(value) else f"{value:,.{digits}f}"


def number(value: float, metric: str) -> str:
    """Return a value of a metric."""
    return plain(100 * value, 2) if is_percentage(metric) else plain(value, 4)


def mean_and_std(mean: float, std: float, metric: str) -> str:
    """Return "mean ± deviation", or what there is of it."""
    return " ± ".join(text for value in (mean, std) if (text := number(value, metric)))


def signed(number: str, unit: str = "") -> str:
    """Return a formatted number with its sign."""
    return f"{'' if number.startswith('-') else '+'}{number}{unit}" if number else ""


def chance(p: float) -> str:
    """Return a p-value."""
    return "< 0.001" if p < 0.001 else plain(p, 3)
