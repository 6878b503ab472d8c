"""Is every environment variable read when asked, checked, and documented?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashgen import settings
from flashgen.errors import CompileError, DeviceError, DtypeError, FlashgenError, ShapeError, VariantError, numbered

NAMES = ("DEBUG", "DUMP", "OVERRIDE", "TARGET", "CACHE", "TUNE")


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(f"FLASHGEN_{name}", raising=False)
    monkeypatch.delenv("CXX", raising=False)


def test_defaults():
    assert settings.debug() == 0
    assert [read() for read in (settings.dump, settings.override, settings.target, settings.cache, settings.tune, settings.compiler)] == [None] * 6


def test_values_are_read_at_each_call(monkeypatch):
    monkeypatch.setenv("FLASHGEN_DEBUG", "3")
    monkeypatch.setenv("FLASHGEN_TARGET", "sm90a")
    monkeypatch.setenv("FLASHGEN_CACHE", "~/kernels")
    monkeypatch.setenv("FLASHGEN_DUMP", "dumped")
    monkeypatch.setenv("CXX", "ccache g++")
    assert (settings.debug(), settings.target(), settings.compiler()) == (3, "sm90a", "ccache g++")
    assert settings.cache() == Path("~/kernels").expanduser() and settings.dump() == Path("dumped")
    for text, value in (("0", False), ("1", True)):
        monkeypatch.setenv("FLASHGEN_TUNE", text)
        assert settings.tune() is value
    monkeypatch.setenv("FLASHGEN_CACHE", "off")
    monkeypatch.setenv("FLASHGEN_DEBUG", "")
    assert settings.cache() == "off" and settings.debug() == 0


@pytest.mark.parametrize(("name", "read"), [("FLASHGEN_DEBUG", settings.debug), ("FLASHGEN_TUNE", settings.tune)])
def test_a_wrong_value_names_the_variable_and_the_values(monkeypatch, name, read):
    monkeypatch.setenv(name, "yes")
    with pytest.raises(FlashgenError, match=rf"{name}='yes': the values are 0, 1.*Correct or unset"):
        read()


def test_every_variable_that_is_read_is_documented_once():
    text = Path(settings.__file__).read_text()
    rows = re.findall(r"^\| ``(\w+)`` \|", settings.__doc__ or "", re.MULTILINE)
    assert sorted(rows) == sorted({*(f"FLASHGEN_{name}" for name in NAMES), "CXX"})
    code = text.split('"""', 2)[2]
    assert set(re.findall(r'"(FLASHGEN_\w+|CXX)"', code)) == set(rows)


def test_templates_are_found():
    assert (settings.templates_directory() / "include" / "fg").is_dir()


def test_error_kinds():
    for kind in (VariantError, ShapeError, DtypeError, DeviceError, CompileError):
        assert issubclass(kind, FlashgenError)
    assert issubclass(ShapeError, ValueError) and issubclass(DtypeError, TypeError)


def test_a_compile_error_shows_its_parts_survives_pickling_and_cuts_a_long_log():
    import pickle

    error = CompileError("g++ rejected it.", "\n".join(f"log {number}" for number in range(1000)), numbered("a\nb\nc\nd", 3, context=1))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.log == error.log
    assert "->     3 | c" in str(error) and "   2 | b" in str(error) and "1 | a" not in str(error)
    assert "log 39" in str(error) and "log 40" not in str(error)
