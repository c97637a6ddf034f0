"""The generated pages are current, and links and paths in the written ones lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def _gen_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_docs", ROOT / "scripts" / "gen_docs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """The anchors that a page's headings make, as GitHub names them."""
    headings = re.findall(r"^#+\s+(.*)$", _without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_generated_pages_are_current() -> None:
    outdated = [page.name for page in _gen_docs().outdated()]
    assert not outdated, f"run: python scripts/gen_docs.py  ({', '.join(outdated)} would change)"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", _without_code(page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {path}, which does not exist"
        if anchor:
            assert anchor in _anchors(target), f"{page.name}: {target.name} has no heading #{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_named_in_text_exist(page: Path) -> None:
    named = re.findall(r"`((?:dtorch|native|tests|scripts|examples|benchmarks|docs)/[\w./-]+)`", page.read_text())
    missing = [name for name in named if not (ROOT / name).exists() and name != "dtorch/_build.py"]
    assert not missing, f"{page.name} names files that do not exist: {missing}"


def test_every_invariant_prefix_is_listed() -> None:
    """Invariants look like ``ABC-1 text`` in a module's or header's opening; architecture.md lists the prefixes."""
    sources = [*ROOT.glob("dtorch/**/*.py"), *ROOT.glob("native/**/*.h"), *ROOT.glob("native/**/*.cpp")]
    used = {
        prefix
        for source in sources
        for prefix in re.findall(r"^(?://\s*|#\s*)?([A-Z]{2,6})-\d+\b", source.read_text(), re.MULTILINE)
    }
    listed = set(re.findall(r"^\| `([A-Z]{2,6})` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE))
    assert used <= listed, f"docs/architecture.md does not list the prefixes {sorted(used - listed)}"
