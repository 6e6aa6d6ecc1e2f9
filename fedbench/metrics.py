"""What a metric's name says about it."""


def higher_is_better(metric: str) -> bool:
    """Return whether more of a metric is better, which holds for all but losses."""
    return "loss" not in metric.split("/")


def is_percentage(metric: str) -> bool:
    """Return whether a metric is shown in percent."""
    return "accuracy" in metric.split("/")
