"""The page: whole in itself, with all that the comparison says as text, and in a browser as it should be."""

import base64
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from test_figures import CARD, done
from test_report import PUBLISHED, cell, diverged

from fedbench.config import Suite
from fedbench.data import About
from fedbench.errors import InputError
from fedbench.report import compare, figures, html, read_formats, write
from fedbench.report.table import Comparison
from fedbench.results import Result, Results

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
NASTY = r"""<script>document.title = "owned"</script> & "it's" _ % # $x$ { } ~ ^ \ {{ 7 * 7 }} é λ"""
VOID = {"meta", "link", "br", "img", "hr", "input"}


def results() -> Results:
    """Return two data sets × n = 3, 4 × five rows × two seeds, of which some are missing or diverged."""
    rows: list[Result] = []
    for dataset, base in (("digits", 0.3), ("flowers", 0.6)):
        for n in (3, 4):
            for seed in (0, 1):
                for place, label in enumerate(("local", "fedavg", "fedper", NASTY)):
                    at: dict[str, Any] = {"dataset": dataset, "n": n, "seed": seed}
                    one = cell(label, "fedprox" if label == NASTY else "", **at)
                    last = base + 0.05 * place + 0.01 * seed
                    up = 1000 * place
                    rows.append(done(one, [0.1, 0.2], [last, last - 0.1 * n / 3], up=up, before=[0.1, 0.1]))
                rows.append(diverged(cell("fedrep", **at), 2))
                rows.append(Result(cell("fesem", **at), "missing"))
    columns: Any = CARD["per_client"]
    sizes = {"train": [11, 15], "validation": [0, 0], "test": [90, 10]}
    card = {**CARD, "hash": "0123456789abcdef" * 4, "per_client": {**columns, **sizes}}
    cards = {one.cell.partition_key: card for one in rows}
    return Results(tuple(rows), cards, {"d" * 64: About(NASTY, "a museum", "CC0")})


def made() -> tuple[Comparison, str]:
    found = results()
    suite = Suite(name="study", description=f"First paragraph {NASTY}\n\nSecond one", further_metrics=["test/loss"])
    comparison = compare(found, suite, PUBLISHED)
    return comparison, html.render(comparison, figures.figures(found, suite))


COMPARISON, PAGE = made()


class Outline(HTMLParser):
    """Reads a page strictly: every element is closed in its turn; keeps elements with attributes, and all text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def outline() -> Outline:
    parsed = Outline()
    parsed.feed(PAGE)
    parsed.close()
    assert parsed.open == []
    return parsed


# --- as text


def test_the_same_results_give_the_same_page() -> None:
    assert made()[1] == PAGE


def test_everything_that_the_comparison_says_is_on_the_page(outline: Outline) -> None:
    text = " ".join(" ".join(outline.text).split())
    tables = (*COMPARISON.tables, *COMPARISON.tuning, COMPARISON.rows, COMPARISON.partitions)
    said = [COMPARISON.title, "Second one", *COMPARISON.reading, *COMPARISON.notes]
    said += [part for pair in COMPARISON.provenance for part in pair]
    said += [part for table in tables for line in (table.head, *table.rows) for part in line]
    said += [figure.caption for figure in figures.figures(results(), Suite(name="study"))]
    assert [part for part in said if " ".join(part.split()) not in text] == []


def test_what_a_suite_says_stays_text(outline: Outline) -> None:
    assert len(outline.of("script")) == 1
    assert PAGE.count("<script>document") == 0
    assert NASTY in "\n".join(outline.text)
    assert "49" not in re.findall(r"\{\{[^}]*\}\}", " ".join(outline.text))


def test_the_page_is_whole_in_itself(outline: Outline) -> None:
    outward = [
        value
        for _, attributes in outline.elements
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "srcset", "action", "data", "poster") and value
    ]
    assert outward
    assert all(value.startswith(("#", "data:")) for value in outward)
    assert not re.search(r"@import|url\((?!#)", PAGE)


def test_its_policy_lets_nothing_load_and_only_its_own_script_run(outline: Outline) -> None:
    (policy,) = (m["content"] for m in outline.of("meta") if m.get("http-equiv") == "Content-Security-Policy")
    script = PAGE[PAGE.index("<script>") + len("<script>") : PAGE.index("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy
    assert policy.startswith("default-src 'none';")
    assert f"script-src 'sha256-{digest}';" in policy


def test_it_can_be_read_by_a_machine_that_reads_aloud(outline: Outline) -> None:
    assert outline.of("html") == [{"lang": "en"}]
    levels = [int(tag[1]) for tag, _ in outline.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert all(head.get("scope") in ("col", "row") for head in outline.of("th"))
    drawn = [attributes for tag, attributes in outline.elements if attributes.get("role") == "img"]
    assert len(drawn) == len(outline.of("svg")) == len(outline.of("figure")) == len(outline.of("figcaption")) > 20
    assert all(len(attributes.get("aria-label") or "") > 20 for attributes in drawn)
    assert all(box.get("aria-label") for _, box in outline.elements if box.get("role") == "region")


def test_links_and_ids_meet(outline: Outline) -> None:
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert {link["href"] for link in outline.of("a")} <= {f"#{name}" for name in ids}


def test_the_best_number_stands_out(outline: Outline) -> None:
    best = [attributes for attributes in outline.of("td") if "best" in (attributes.get("class") or "")]
    assert len(best) == sum(len(block.columns) for block in COMPARISON.blocks)


def test_a_page_without_figures_and_numbers_is_one_too() -> None:
    found = Results((Result(cell("local"), "missing"),))
    page = html.render(compare(found, Suite(name="study")))
    assert "0 of 1 cells finished" in page
    assert "<svg" not in page


def test_every_format_has_its_files_which_are_the_same_each_time(tmp_path: Path) -> None:
    found = results()
    at = "digits", 3
    digits = tuple(one for one in found.cells if (one.cell.facts()["dataset"], one.cell.facts()["n"]) == at)
    few = Results(digits, found.cards, found.sources)
    suite = Suite(name="study")
    written = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        formats = read_formats("html, md,latex,csv,md", "--format")
        paths = [*write(few, suite, compare(few, suite), folder, formats, save_figures=True)]
        names = ["report.html", "report.md", "report.tex", "tables.tex", "results.csv", "summary.csv", "figures"]
        assert [path.name for path in paths] == names
        files = [path for path in folder.rglob("*") if path.is_file()]
        written.append({path.relative_to(folder).as_posix(): path.read_bytes() for path in files})
    assert written[0] == written[1]
    drawn = figures.figures(few, suite)
    assert {f"figures/{figure.name}.{kind}" for figure in drawn for kind in ("svg", "pdf")} <= written[0].keys()
    with pytest.raises(InputError, match=r"^--format htlm: unknown format 'htlm'; did you mean 'html'"):
        read_formats("htlm", "--format")


# --- in a browser

needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium and chromedriver here, so the page is not looked at"
)


class Browser:
    """Chromium with a page open, on a screen of some width."""

    def __init__(self, page: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM or ""
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self._driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        self._page = page.as_uri()

    def open(self, width: int) -> None:
        """Load the page anew."""
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        self._driver.get(self._page)

    def run(self, script: str) -> Any:
        """Return what a script in the page returns."""
        return self._driver.execute_script(script)

    def requests(self) -> list[str]:
        """Return the addresses that the page asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self._driver.get_log("performance")]  # type: ignore[no-untyped-call]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """Return what stands in the console."""
        return [entry["message"] for entry in self._driver.get_log("browser")]  # type: ignore[no-untyped-call]

    def quit(self) -> None:
        """Close it."""
        self._driver.quit()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    page = tmp_path_factory.mktemp("page") / "report.html"
    page.write_text(PAGE, encoding="utf-8")
    os.environ["SE_OFFLINE"] = "true"  # selenium itself looks for nothing on the network
    found = Browser(page)
    yield found
    found.quit()


@needs_browser
@pytest.mark.parametrize("width", [390, 1440])
def test_nothing_overflows_and_nothing_is_asked_for(browser: Browser, width: int) -> None:
    browser.open(width)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    # Only what is inside a box that scrolls may be wider than the screen.
    wide = browser.run(
        "return [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll table, svg') && "
        "e.getBoundingClientRect().right > innerWidth + 0.5).map(e => e.outerHTML.slice(0, 80))"
    )
    assert wide == []
    asked = browser.requests()
    assert any(address.startswith("file:") and address.endswith("/report.html") for address in asked)
    assert [a for a in asked if not a.startswith(("data:", "file:")) or a.endswith(".js")] == []
    assert len([a for a in asked if a.startswith("file:")]) == 1
    assert browser.complaints() == []
    assert browser.run("return document.title") == "study"


@needs_browser
def test_all_figures_render(browser: Browser) -> None:
    browser.open(390)
    boxes = browser.run(
        "return [...document.querySelectorAll('figure svg')].map(s => [s.clientWidth, s.clientHeight, "
        "s.getBBox().width, s.querySelectorAll('path').length, s.querySelectorAll('text').length])"
    )
    assert len(boxes) == PAGE.count("<svg")
    assert all(
        width > 250 and height > 100 and inner > 0 and paths and texts for width, height, inner, paths, texts in boxes
    )


@needs_browser
def test_text_in_figures_can_be_read_on_a_phone(browser: Browser) -> None:
    browser.open(390)
    heights = browser.run(
        "return [...document.querySelectorAll('figure svg text')].map(t => parseFloat(getComputedStyle(t).fontSize) * "
        "t.ownerSVGElement.clientWidth / t.ownerSVGElement.viewBox.baseVal.width)"
    )
    assert min(heights) > 6


@needs_browser
def test_a_table_sorts_by_a_click_and_back(browser: Browser) -> None:
    browser.open(1440)
    column = "[...document.querySelector('table').tBodies[0].rows].map(row => row.cells[1].textContent)"
    click = "document.querySelector('table').tHead.rows[0].cells[1].querySelector('button').click();"
    sort = "return [document.querySelector('th[aria-sort]').getAttribute('aria-sort'), " + column + "]"
    before = browser.run(f"return {column}")
    down, falling = browser.run(click + sort)
    up, rising = browser.run(click + sort)
    numbers = [text for text in before if text[0].isdigit()]
    words = [text for text in before if not text[0].isdigit()]
    assert words
    assert (down, up) == ("descending", "ascending")
    assert falling == sorted(numbers, key=lambda text: -float(text.split()[0])) + words
    assert rising == sorted(numbers, key=lambda text: float(text.split()[0])) + words


@needs_browser
def test_a_column_of_words_sorts_too(browser: Browser) -> None:
    browser.open(1440)
    names = browser.run(
        "const t = document.querySelector('table'); t.tHead.rows[0].cells[0].querySelector('button').click();"
        "return [...t.tBodies[0].rows].map(row => row.cells[0].textContent)"
    )
    assert names[1:] == ["fedavg", "fedper", "fedrep", "fesem", "local"]
