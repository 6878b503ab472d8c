"""Does the wheel hold what an installed flashgen needs, and do README and .ci/run agree?"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 or later")

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def commands() -> list[str]:
    """The lines of README's shell blocks that install and run something: exactly two for a fresh machine."""
    blocks = re.findall(r"^```(?:bash|sh|shell)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("pip install ")]


def test_every_subpackage_is_listed():
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "flashgen").rglob("*.py")}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found | {"flashgen.templates"}


@pytest.mark.slow
def test_the_wheel_ships_sources_templates_and_licence(tmp_path):
    # A copy, so that no build folder appears in the checkout.
    sources = [path for folder in ("flashgen", "templates") for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in (*sources, *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE"))):
        copy = tmp_path / "checkout" / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    program = f"import setuptools.build_meta as build; build.build_wheel({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "checkout", capture_output=True, text=True)
    if "No module named 'setuptools'" in done.stderr:
        pytest.skip("setuptools is not installed")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("flashgen-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {path.relative_to(ROOT).as_posix() for path in sources if path.suffix in (".py", ".typed")}
    expected |= {"flashgen/" + path.relative_to(ROOT).as_posix() for path in sources if path.suffix in (".j2", ".h", ".cuh")}
    assert expected <= names, expected - names
    assert any(name.endswith("LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {"flashgen", f"flashgen-{PROJECT['project']['version']}.dist-info"}


def test_readme_gives_two_commands_for_a_fresh_machine_and_ci_runs_them():
    quickstart, tests = commands()
    assert "examples/quickstart.py" in quickstart and "pytest" in tests
    assert "pip install -e" not in quickstart + tests, "neither command needs an editable checkout"
    script = (ROOT / ".ci" / "run").read_text()
    assert "README.md" in script, "CI reads the commands from README, so that they cannot drift apart"
    extras = PROJECT["project"]["optional-dependencies"]
    for command in (quickstart, tests):
        for extra in re.search(r"\.\[([\w,]+)\]", command)[1].split(","):  # type: ignore[index]
            assert extra in extras
