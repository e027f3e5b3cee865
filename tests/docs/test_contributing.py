"""CONTRIBUTING.md names files, and names in them, that are there."""

import re

from page_parts import section
from places import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PACKAGES = ("trainer/", "services/", "retriever_service/", "tests/", "docs/")


def test_every_path_is_there():
    paths = [p for p in re.findall(r"`([\w./]+)`", PAGE) if p.startswith(PACKAGES) and "NAME" not in p]
    assert len(paths) > 50
    assert [p for p in paths if not (ROOT / p).exists()] == []
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", PAGE) if "://" not in link]
    assert links and [link for link in links if not (ROOT / link).exists()] == []


def test_what_is_named_in_a_file_stands_there():
    """`name` in `path.py`, and several names of one file."""
    named = re.findall(r"((?:`[\w.]+`(?: and |, )?)+)\s+(?:in|of)\s+`([\w/]+\.py)`", PAGE)
    found = 0
    for names, path in named:
        if not path.startswith(PACKAGES):
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        for name in re.findall(r"`([\w.]+)`", names):
            for part in name.split("."):
                assert re.search(rf"\b{part}\b", text), f"{path} has no {name}"
            found += 1
    assert found > 20


def test_every_section_is_there():
    """`page.md`, "Section"."""
    named = re.findall(r'`(docs/\w+\.md)`[^`"]{0,40}"([^"]+)"', " ".join(PAGE.split()))
    assert len(named) >= 3
    for page, title in named:
        heads = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert any(head.startswith(title) for head in heads), f"{page} has no section {title}"


def test_every_test_to_copy_is_there():
    names = set(re.findall(r"`(test_\w+)`", PAGE))
    defined = {
        name
        for file in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(names) > 8 and names - defined == set()


def test_every_room_says_where_its_tests_are():
    """Each folder of tests has a place in the table, and so has each package of the map."""
    table = section(PAGE, "Test one room")
    folders = {p.name for p in (ROOT / "tests").iterdir() if list(p.glob("*.py"))}
    assert [name for name in sorted(folders) if f"`tests/{name}/`" not in table] == []
    rooms = {
        f"{package}/{p.name}/"
        for package in ("trainer", "services")
        for p in (ROOT / package).iterdir()
        if list(p.glob("*.py"))
    }
    assert [room for room in sorted(rooms) if f"`{room}`" not in table] == []
