"""The documentation builds as a site, without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

import tarantella

DOCS = Path(__file__).parents[2] / "docs"


class Page(HTMLParser):
    """The links of a page, the files it loads, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attributes if value}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in ("script", "img") and "src" in values:
            self.loads.append(values["src"])
        if tag == "link" and values.get("rel") == "stylesheet":
            self.loads.append(values["href"])
        if "id" in values:
            self.anchors.add(values["id"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "-q"]
    built = subprocess.run(
        [*command, "-b", "html", "-d", str(folder / "doctrees"), str(DOCS), str(folder / "html")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    return folder / "html"


def test_every_link_leads_somewhere(site: Path) -> None:
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            if link.startswith(("http://", "https://", "mailto:")):
                continue
            target, _, anchor = link.partition("#")
            file = (path.parent / target).resolve() if target else path
            assert file.exists(), f"{path.name}: {link}"
            if anchor and file in pages:
                assert anchor in pages[file].anchors, f"{path.name}: {link}"


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """So the site also looks right on a cluster without Internet access."""
    for path in site.rglob("*.html"):
        for file in Page(path).loads:
            assert not file.startswith(("http:", "https:", "//")), f"{path.name}: {file}"
            assert (path.parent / file.partition("?")[0]).exists(), f"{path.name}: {file}"


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    anchors = Page(site / "api.html").anchors
    names = {f"tarantella.{name}" for name in tarantella.__all__}
    names |= {f"tarantella.models.{name}" for name in tarantella.models.__all__}
    assert names <= anchors


def test_it_can_be_searched(site: Path) -> None:
    assert "tnt_micro_batch_s" in (site / "searchindex.js").read_text()


@pytest.mark.parametrize("name", ["batch.svg", "run.svg"])
def test_a_picture_can_be_read_on_a_phone_from_its_first_frame_on(name: str) -> None:
    """It is 360 pixels wide there, so text is scaled down; what moves is visible before it does."""
    text = (DOCS / "images" / name).read_text()
    picture = ElementTree.fromstring(text)
    smallest = min(float(size) for size in re.findall(r'font-size(?:="|: )(\d+)', text))
    assert smallest * 360 / float(picture.attrib["width"]) >= 9
    assert all(float(opacity) >= 0.5 for opacity in re.findall(r"opacity: ([\d.]+)", text))


def test_the_picture_of_a_run_shows_the_quick_start() -> None:
    assert "-- examples/quickstart.py</title>" in (DOCS / "images" / "run.svg").read_text()
