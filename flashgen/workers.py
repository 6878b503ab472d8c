"""Workers: candidate kernels compiled by processes that can be killed.

(Form, Problem, Target, Plans) -> Built for each plan. Example::

    with Pool(8) as pool:
        for number, built in pool.compile(form, problem, target, plans): ...

A worker is a fresh interpreter (never a fork: CUDA may be in use) without torch; it reads requests from its standard input and ends when that closes. It
writes nothing but into a folder of the pool's, so a worker killed at any moment leaves nothing behind; what it made is stored by the caller. A compiler
can take half a minute on one bad candidate (ptxas, while it spills): past the limit the worker and the compiler it started are killed together.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import build, cache, pipeline
from .form import Form
from .plan import Plan
from .problem import Problem
from .source import Binary
from .target import Target

COMPILE_SECONDS = 60.0  # of one candidate; a good one takes one or two
_SERVE = """
import sys, types
package = types.ModuleType("flashgen")  # the package without its __init__, which would import torch
package.__path__ = [sys.argv[1]]
sys.modules["flashgen"] = package
from flashgen.workers import serve
serve()
"""


@dataclass(frozen=True)
class Built:
    """What became of one candidate: its store key and Binary, or why there is none."""

    key: str = ""
    binary: Binary | None = None
    failure: str = ""


class _Worker:
    """One process and what it is doing. It leads a process group, so that its compiler ends with it, and a Ctrl-C at the terminal reaches only us."""

    def __init__(self, folder: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "TMPDIR": folder}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(Path(__file__).parent)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True,
        )  # fmt: skip
        self.number, self.deadline = -1, 0.0

    def send(self, number: int, request: Any, seconds: float) -> None:
        assert self.process.stdin is not None
        self.number, self.deadline = number, time.monotonic() + seconds
        with contextlib.suppress(OSError):  # it died: told when its output is read
            pickle.dump(request, self.process.stdin)
            self.process.stdin.flush()

    def receive(self) -> Built:
        assert self.process.stdout is not None
        try:
            return pickle.load(self.process.stdout)
        except (EOFError, pickle.UnpicklingError, OSError):
            return Built(failure=f"its compiler process ended with status {self.process.wait()}")

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not flushed to a process that is gone
                pipe.close()


class Pool:
    """Up to ``size`` workers, started when there is work. Leaving the ``with`` block, by whatever way, kills them and removes their folder."""

    def __init__(self, size: int, *, seconds: float = COMPILE_SECONDS) -> None:
        self.size, self.seconds = size, seconds
        self._workers: list[_Worker] = []

    def __enter__(self) -> Pool:
        self._folder = tempfile.mkdtemp(prefix="flashgen-tune-")
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    def compile(self, form: Form, problem: Problem, target: Target, plans: Sequence[Plan]) -> Iterator[tuple[int, Built]]:
        """(number of the plan, what became of it) in the order in which they are done."""
        todo = deque(enumerate(plans))
        busy: list[_Worker] = []
        with selectors.DefaultSelector() as selector:
            while todo or busy:
                while todo and len(busy) < self.size:
                    idle = next((worker for worker in self._workers if worker not in busy), None)
                    if idle is None:
                        idle = _Worker(self._folder)
                        self._workers.append(idle)
                    number, plan = todo.popleft()
                    idle.send(number, (form.text, problem, target, plan), self.seconds)
                    selector.register(idle.process.stdout, selectors.EVENT_READ, idle)  # type: ignore[arg-type]
                    busy.append(idle)
                ready = [key.data for key, _ in selector.select(max(0.0, min(worker.deadline for worker in busy) - time.monotonic()))]
                late = [worker for worker in busy if worker not in ready and worker.deadline <= time.monotonic()]
                for worker in (*ready, *late):
                    selector.unregister(worker.process.stdout)
                    busy.remove(worker)
                    built = worker.receive() if worker in ready else Built(failure=f"stopped after {self.seconds:.0f} s of compiling")
                    if worker in late or worker.process.poll() is not None:
                        worker.kill()
                        self._workers.remove(worker)
                    yield worker.number, built


def serve() -> None:
    """The worker's side: (form text, problem, target, plan) in, Built out, until the pool closes its end."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints goes to stderr: standard output carries replies alone
    while True:
        try:
            pickle.dump(_built(*pickle.load(requests)), replies)
            replies.flush()
        except (EOFError, BrokenPipeError):  # the pool is gone, perhaps in the middle of a compilation
            os._exit(0)


def _built(form_text: str, problem: Problem, target: Target, plan: Plan) -> Built:
    try:
        source = pipeline.emit_source(Form.parse(form_text), problem, target, plan)
        key = build.store_key(source, target)
        return Built(key, cache.current().get_binary(key) or build.build(source, target))
    except Exception as error:  # told to the tuner's user, as the candidate's verdict
        return Built(failure=f"{type(error).__name__}: {str(error).splitlines()[0]}")
