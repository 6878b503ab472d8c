"""Does what README shows run, and is what it quotes really there?"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashgen.__main__ import parser

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", [text for language, text in BLOCKS if language == "python"])
def test_python_blocks_run(text):
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr


def test_the_first_block_is_the_example_and_short():
    language, text = BLOCKS[0]
    assert language == "python" and len([line for line in text.splitlines() if line.strip()]) <= 12


def test_the_quoted_kernel_is_a_kept_one():
    """A block of emitted source stands word for word in the kept kernel that README names before it; a line of dots leaves something out."""
    quoted = re.findall(r"`generated/([\w.]+)`[^`]*```cpp\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert quoted
    for name, block in quoted:
        kept = (ROOT / "generated" / name).read_text()
        for part in re.split(r"^ *\.\.\. *\n", block, flags=re.MULTILINE):
            assert part in kept, f"README quotes what generated/{name} does not hold:\n{part}"


def test_quoted_commands_exist():
    for line in re.findall(r"^python -m flashgen (.*)$", README, re.MULTILINE):
        import shlex

        parser().parse_args(shlex.split(line, comments=True))


def test_links_lead_somewhere():
    for link in re.findall(r"\]\(([^)#]+)", README):
        assert link.startswith("http") or (ROOT / link).exists(), link
