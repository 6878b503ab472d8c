"""Does every Python block of docs/ run, is its shown output what it prints, and is what the pages quote really there?"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

import flashgen
from flashgen import tune
from flashgen.__main__ import parser

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```([\w ]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = tune.Effort(load=0.05, burst=0.001, pause=0.0, rounds=3, settling=0.01)


def blocks(page: Path) -> list[tuple[str, str]]:
    return [(found[1].strip(), found[2]) for found in BLOCK.finditer(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run_and_print_what_is_shown(page, monkeypatch, tmp_path):
    """The blocks of a page share their names. Each line of a ``text`` block stands in what the block before it printed; a line of dots leaves out."""
    if any("transformers" in text for language, text in blocks(page) if language == "python"):
        pytest.importorskip("transformers")
    if page.stem == "tuning":
        monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path))  # records of the page's own
        monkeypatch.setattr(tune, "Effort", lambda: SHORT)
    names: dict[str, object] = {"__name__": "docs"}
    printed = ""
    flashgen.repeat.forget()
    for language, text in blocks(page):
        if language == "python nvrtc":
            pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
        if language.startswith("python"):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, str(page), "exec"), names)
            printed = out.getvalue()
        elif language == "text":
            for line in text.splitlines():
                assert line == "..." or line in printed, f"{page.name} shows {line!r}, its code printed:\n{printed}"
    flashgen.repeat.forget()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_quoted_kernels_commands_and_links_exist(page):
    kernel = (ROOT / "generated" / "sm80_own_functions_forward_float16.cu").read_text()
    for language, text in blocks(page):
        if language == "cuda":
            for part in re.split(r"^\.\.\.\n", text, flags=re.MULTILINE):
                assert part in kernel, f"{page.name} quotes what the kept kernel does not hold:\n{part}"
        if language == "bash":
            for line in text.splitlines():
                parser().parse_args(shlex.split(line, comments=True)[3:])
    for command in re.findall(r"`python -m flashgen ([^`]*)`", page.read_text()):
        if "..." not in command:
            try:
                parser().parse_args(shlex.split(command))
            except SystemExit:
                assert len(command.split()) == 1, f"{page.name} names a command that is none: {command}"  # a bare name may lack its arguments
    for link in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert link.startswith("http") or (page.parent / link).exists(), link


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text()
    assert all(f"({page.name})" in index for page in PAGES if page.name != "README.md")
