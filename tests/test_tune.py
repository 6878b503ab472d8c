"""Does the tuner choose by its rules, keep what it measured, and leave nothing behind when it or a worker is killed?

The CPU family is tuned for real, over a few candidates; choosing is replayed from a recorded table, which needs no device.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashgen
from flashgen import cache, pipeline, records, tune, workers
from flashgen import target as targets
from flashgen.measured import Measured, Row, best
from flashgen.problem import Problem
from flashgen.progress import Bars
from flashgen.tune import Effort

ROOT = Path(__file__).parent.parent
CAUSAL = flashgen.Variant(mask=flashgen.causal)
FEW = {"amx": 0, "block_q": 32}  # leaves five candidates on the CPU, one for each block_kv
QUICK = Effort(load=0.01, burst=0.001, pause=0.0, rounds=3, settling=0.01)


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """A cache of the test's own, nothing loaded, and a quick measurement."""
    monkeypatch.setenv("FLASHGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHGEN_TUNE", raising=False)
    monkeypatch.setattr(tune, "Effort", lambda: QUICK)
    flashgen.repeat.forget()
    yield
    flashgen.repeat.forget()


def tensors(length: int = 100, dim: int = 32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, length, dim, generator=generator) for _ in range(3)]


def exact(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def row(hot: float | None, **fields: int) -> Row:
    return Row("cpu", {"block_q": 32, **fields}, 1.0, hot, hot)


# ---- choosing ----------------------------------------------------------------------------------------------------------------------------------


def test_the_fastest_wins_unless_the_tilers_choice_is_close():
    assert best([row(1.00), row(0.90), row(0.80), row(None)]) == 2
    assert best([row(1.00), row(0.985)]) == 0, "a difference under 2 %"
    assert best([row(1.00), row(0.97)]) == 1
    assert best([row(1.00), row(None)]) == 0


RECORDED = sorted((ROOT / "tests" / "recorded").glob("tuning*.jsonl"))
LINES = [json.loads(line) for path in RECORDED for line in path.read_text().splitlines()]


@pytest.mark.parametrize("record", LINES, ids=lambda record: f"{record['which']}-{record['problem'][:24]}-{record['shape'][:12]}")
def test_a_recorded_table_replays_to_its_winner(record):
    measured = Measured.of(record)
    assert best(measured.rows) == measured.chosen
    assert records.plan_entry(measured.winner) == record["winner"] and measured.gain >= 1.0
    text = str(measured)
    assert "chosen" in text and "predicted ms" in text and text.count("\n") == len(measured.rows) + 2


def test_a_record_decides_the_plan_of_a_gpu_that_is_not_here(tmp_path):
    kernel = flashgen.compile(flashgen.Variant(head_dim=128, mask=flashgen.causal), target="sm90a", family="sm80")
    pytest.importorskip("cupy_backends")
    form, problem, target = kernel._describe("forward", None, None, None, {})
    ranked = [c.plan for c in pipeline.ranked(form, problem, target, "sm80") if not c.rejected]
    first = kernel.plan()
    other = next(plan for plan in ranked if plan != first)
    assert "choice of the tiler" in kernel.explain()
    records.append(records.key(form, problem, target, "sm80", None), {"winner": records.plan_entry(other)})
    assert kernel.plan() == other and "a record of the tuner" in kernel.explain() and str(other) in kernel.explain()
    ignoring = flashgen.compile(kernel.variant, target="sm90a", family="sm80", tune=False)
    assert ignoring.plan() == first
    short = replace(problem, size="short")
    assert pipeline.recorded(form, short, target, "sm80", None) is None, "another size class is another record"
    assert pipeline.recorded(form, problem, replace(target, chip="another"), "sm80", None) is None, "another chip too"


def test_a_family_without_a_cost_model_predicts_no_time():
    trial = tune.Trial(
        CAUSAL.plain.form, Problem("float32", 64, 64), targets.parse("sm90a"), torch.device("cpu"), "sm80", None, None, {}, {}, {}, dict, (), lambda: 1e9, ()
    )  # fmt: skip
    rows = tune.candidate_rows(trial)
    assert rows and all(r.predicted_ms is None for r in rows), "float32 on sm80: one plan, whose cost is a constant"
    rows = tune.candidate_rows(replace(trial, problem=Problem("bfloat16", 64, 64)))
    assert len(rows) > 4 and all(0.01 < r.predicted_ms < 100 for r in rows)


def test_a_damaged_record_is_none(tmp_path):
    key = "k" * 64
    for line in ({}, {"winner": 3}, {"winner": {"family": "cpu", "which": "forward", "fields": {"block_q": "many"}}}):
        records.append(key, line)
        assert records.winner(key) is None
    records.append(key, {"winner": {"family": "cpu", "which": "forward", "fields": {"block_q": 32}}})
    (tmp_path / "cache" / "tuning" / f"{key}.jsonl").open("a").write('{"winner": ')  # cut short by a killed process
    assert records.winner(key).block_q == 32


# ---- the whole tuner, on the CPU ---------------------------------------------------------------------------------------------------------------


def test_tuning_reports_every_plan_and_later_kernels_use_the_winner():
    q, k, v = tensors()
    kernel = flashgen.compile(CAUSAL, plan=FEW)
    report = flashgen.autotune(kernel, q, k, v, progress=False)
    assert [measured.which for measured in report.passes] == ["forward", "backward"]
    for measured in report.passes:
        assert len(measured.rows) == 5 and all(r.predicted_ms > 0 for r in measured.rows)
        assert all(r.cool_ms for r in measured.rows if not r.verdict), measured
        assert measured.rows[0].hot_ms and measured.rows[measured.chosen].hot_ms
        assert kernel.plan(q, k, v, which=measured.which) == measured.winner
    assert "tiler's" in str(report) or "chosen" in str(report)
    torch.testing.assert_close(kernel(q, k, v), exact(q, k, v), atol=1e-5, rtol=1e-4)


def test_calls_made_before_take_the_winner_too():
    """Also those whose shapes go straight to the launch; and a decoding step, whose heads run as rows."""
    for q_len, heads in ((100, 2), (1, 4)):
        k, v = tensors()[:2]
        q = torch.randn(1, heads, q_len, 32)
        kernel = flashgen.compile(CAUSAL, plan={"amx": 0, "block_q": 16})
        expected = [kernel(q, k, v) for _ in range(3)][-1]
        form, problem, target = kernel._describe("forward", q, k, v, {})
        first = kernel.plan(q, k, v)
        other = next(c.plan for c in pipeline.ranked(form, problem, target, "cpu", dict(kernel.forced)) if c.plan != first and not c.rejected)
        records.append(records.key(form, problem, target, None, dict(kernel.forced)), {"winner": records.plan_entry(other)})
        flashgen.repeat.forget()
        torch.testing.assert_close(kernel(q, k, v), expected, atol=1e-5, rtol=1e-4)
        assert {loaded.executable.plan for loaded in flashgen.runs._executables.values()} == {other}
        (measured,) = flashgen.autotune(kernel, q, k, v, backward=False, progress=False).passes
        assert len(measured.rows) == 5 and not any(r.verdict for r in measured.rows) and kernel.plan(q, k, v) == measured.winner


def test_a_second_process_uses_the_record_and_stays_light():
    q, k, v = tensors()
    kernel = flashgen.compile(CAUSAL, plan=FEW)
    form, problem, target = kernel._describe("forward", q, k, v, {})
    last = [c.plan for c in pipeline.ranked(form, problem, target, "cpu", FEW) if not c.rejected][-1]
    records.append(records.key(form, problem, target, None, FEW), {"winner": records.plan_entry(last)})
    kernel(q, k, v)
    assert kernel.plan(q, k, v) == last
    assert_warm(f"assert kernel.plan(q, q, q).block_kv == {last.block_kv}")


def test_a_process_after_the_tuner_starts_warm():
    flashgen.autotune(flashgen.compile(CAUSAL, plan=FEW), *tensors(), progress=False)
    assert_warm("")


def assert_warm(more: str) -> None:
    """A process that asks for tuning, where there is a record: nothing is measured, compiled or emitted."""
    program = f"""
import sys, torch, flashgen
kernel = flashgen.compile(flashgen.Variant(mask=flashgen.causal), plan={FEW}, tune=True)
q = torch.randn(1, 2, 100, 32)
kernel(q, q, q)
assert not {{"sympy", "jinja2"}} & set(sys.modules), "a warm start"
{more}
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, env={**os.environ, "FLASHGEN_DEBUG": "3"})
    assert done.returncode == 0 and done.stderr == "", done.stderr


def test_of_processes_that_ask_at_once_one_measures():
    program = f"""
import torch, flashgen
q = torch.randn(1, 2, 100, 32)
flashgen.compile(flashgen.Variant(mask=flashgen.causal), plan={FEW | {"block_kv": 64}}, tune=True)(q, q, q)
"""
    environment = {**os.environ, "FLASHGEN_DEBUG": "3", "PYTHONPATH": str(ROOT)}
    children = [subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    errors = [child.communicate(timeout=200)[1] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], errors
    assert sum(error.count("predicted ms") for error in errors) == 1, "the others waited for its record"
    held = cache.current()
    assert len(held.record_kinds()) == 1 and len(held.records(held.record_kinds()[0])) == 1
    assert not list((held.directory / "lock").glob("*")) and not list((held.directory / "tmp").glob("*"))


def test_tune_true_measures_at_the_first_call_and_only_then(monkeypatch):
    calls_seen = []
    real = tune.tune
    monkeypatch.setattr(tune, "tune", lambda trial, **options: calls_seen.append(trial.problem.which) or real(trial, **options))
    monkeypatch.setenv("FLASHGEN_TUNE", "1")
    kernel = flashgen.compile(CAUSAL, plan=FEW | {"block_kv": 64})
    monkeypatch.delenv("FLASHGEN_TUNE")
    q, k, v = (t.requires_grad_() for t in tensors())
    for length in (100, 100, 90):
        out = kernel(*(t[:, :, :length] for t in (q, k, v)))
        out.sum().backward()
    torch.testing.assert_close(out, exact(*(t[:, :, :90] for t in (q, k, v))), atol=1e-5, rtol=1e-4)
    assert calls_seen == ["forward", "backward"]
    flashgen.repeat.forget()
    flashgen.compile(CAUSAL, plan=FEW | {"block_kv": 64}, tune=True)(*tensors())
    assert calls_seen == ["forward", "backward"], "the record serves"


def test_packed_sequences_captured_gradients_and_sinks_are_tuned():
    table = torch.randn(2, 9, requires_grad=True)
    kernel = flashgen.compile(flashgen.Variant(score=flashgen.relative_bias(table), sink=True), plan=FEW | {"block_kv": 32})
    q, k, v = (torch.randn(70, 2, 32, dtype=torch.float32) for _ in range(3))
    offsets, sink = torch.tensor([0, 30, 64], dtype=torch.int32), torch.zeros(2)
    given = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "sink": sink}
    before = kernel.varlen(q, k, v, **given)
    report = flashgen.autotune(kernel, q, k, v, progress=False, **given)
    assert [len(measured.rows) for measured in report.passes] == [1, 1] and not any(r.verdict for m in report.passes for r in m.rows)
    torch.testing.assert_close(kernel.varlen(q, k, v, **given), before)


def test_dropout_and_document_tables_are_tuned():
    """A seed, and tables of captured tensors that are made at each call: the trial has its own."""
    documents = torch.arange(1200) // 100
    kernel = flashgen.compile(flashgen.Variant(mask=flashgen.document(documents)), plan=FEW)
    q, k, v = tensors(1200, 16)
    before = kernel(q, k, v, dropout_p=0.3, seed=7)
    report = flashgen.autotune(kernel, q, k, v, progress=False, dropout_p=0.3, seed=7)
    assert not any(r.verdict for m in report.passes for r in m.rows)
    torch.testing.assert_close(kernel(q, k, v, dropout_p=0.3, seed=7), before, atol=1e-5, rtol=1e-4)


def test_a_candidate_that_disagrees_falls_out(monkeypatch):
    """The tuner is handed, for one plan, the binary of another variant: its numbers are not those of the tiler's choice."""
    q, k, v = tensors()
    other = flashgen.Variant(mask=~flashgen.causal)
    assert not other.plain.ints and not other.plain.floats, "its argument struct is that of causal"
    real = workers.Pool.compile

    def compile(self, form, problem, target, plans):
        for number, built in real(self, form, problem, target, plans):
            if number == 1:
                key, binary = pipeline.build.build_cached(pipeline.emit_source(other.plain.form, problem, target, plans[1]), target)
                built = workers.Built(key, binary)
            yield number, built

    monkeypatch.setattr(workers.Pool, "compile", compile)
    kernel = flashgen.compile(CAUSAL, plan=FEW)
    (measured,) = flashgen.autotune(kernel, q, k, v, backward=False, progress=False).passes
    wrong = [r for r in measured.rows if r.verdict]
    assert len(wrong) == 1 and "differs from the tiler's choice" in wrong[0].verdict and wrong[0].hot_ms is None
    torch.testing.assert_close(kernel(q, k, v), exact(q, k, v), atol=1e-5, rtol=1e-4)


def test_what_rounding_left_over_is_judged_with_the_output():
    """Plans that round differently leave different rests: alone, those would differ by their own size where few keys are seen."""
    generator = torch.Generator().manual_seed(0)
    temperature = (0.3 * torch.randn(8, generator=generator)).requires_grad_()
    cubic = (0.02 * torch.randn(8, 2, generator=generator)).requires_grad_()
    reach = torch.randint(0, 200, (512,), generator=generator, dtype=torch.int32)

    def score(s, b, h, q, k):
        s = s * temperature.exp()[h]
        return s + cubic[h, 0] * s * s + cubic[h, 1] * s**3

    mask = flashgen.mask(lambda b, h, q, k: (k <= q) & ((q - k <= reach[q]) | (k % 37 == 0)))
    kernel = flashgen.compile(flashgen.Variant(score=score, mask=mask), plan=FEW)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 8, 300, 32).bfloat16() for _ in range(3))
    assert "out_low" in kernel.source(q, k, v)
    (measured,) = flashgen.autotune(kernel, q, k, v, backward=False, progress=False).passes
    assert len(measured.rows) == 5 and not any(r.verdict for r in measured.rows)


def test_disagreement_is_judged_row_by_row():
    reference = torch.randn(1000, 8)
    one_row_off = reference.clone()
    one_row_off[17] = 0.0
    assert tune.disagreement(reference, reference) == 0.0
    assert tune.disagreement(one_row_off, reference) > 0.2
    assert tune.disagreement(reference * (1 + 1e-6), reference) < 1e-5
    unwritten = reference.clone()
    unwritten[3, 3] = float("nan")
    assert tune.disagreement(unwritten, reference) == float("inf")
    empty = torch.full((4, 2), float("-inf"))
    assert tune.disagreement(empty, empty) == 0.0 and tune.disagreement(-empty, empty) == float("inf")


def test_nothing_is_tuned_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(flashgen.VariantError, match=r"captured: call flashgen\.autotune before"):
        flashgen.autotune(flashgen.compile(CAUSAL, plan=FEW), *tensors(), progress=False)
    assert not list((cache.current().directory / "tuning").glob("*"))


def test_edited_sources_are_not_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHGEN_OVERRIDE", str(tmp_path))
    with pytest.raises(flashgen.FlashgenError, match="FLASHGEN_OVERRIDE is set"):
        flashgen.autotune(flashgen.compile(CAUSAL, plan=FEW), *tensors(), progress=False)


def test_debug_2_prints_the_tilers_table_and_3_the_tuners(monkeypatch, capsys):
    monkeypatch.setenv("FLASHGEN_DEBUG", "3")
    monkeypatch.setattr(tune, "MOST_CANDIDATES", 2)
    flashgen.autotune(flashgen.compile(CAUSAL, plan=FEW), *tensors(), backward=False, progress=False)
    error = capsys.readouterr().err
    assert error.count("clocks a pair") == 5 and "predicted ms" in error


def test_bars_are_shown_on_a_terminal_alone(monkeypatch, capsys):
    for terminal, shown, expected in ((True, True, True), (True, False, False), (False, True, False)):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal, raising=False)
        with Bars("forward", shown=shown) as progress:
            for done in range(3):
                progress("compiling", done, 2)
            progress("timing", 2, 2)
        error = capsys.readouterr().err
        assert ("forward: compiling" in error and "forward: timing" in error and "2/2" in error) == expected, error
        assert error.count("flashgen: tuning the forward, 2 plans\n") == (not terminal)


def test_tune_takes_a_truth_value():
    with pytest.raises(flashgen.VariantError, match="tune='yes'"):
        flashgen.compile(CAUSAL, tune="yes")


# ---- workers -----------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_compiler(tmp_path, monkeypatch) -> Path:
    """A C++ compiler that takes half a minute, and writes its process id first."""
    script = tmp_path / "slow-g++"
    script.write_text(f'#!/bin/sh\ncase "$*" in *-dumpfullversion*) echo 1.0; exit 0;; esac\necho $$ >> {tmp_path}/pids\nexec sleep 30\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / "pids"


def plans() -> tuple:
    kernel = flashgen.compile(CAUSAL, plan=FEW)
    form, problem, target = kernel._describe("forward", *tensors(), {})
    return form, problem, target, [c.plan for c in pipeline.ranked(form, problem, target, "cpu", FEW)]


def wait_for(path: Path, lines: int = 1) -> list[int]:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if path.exists() and len(path.read_text().split()) >= lines:
            return [int(word) for word in path.read_text().split()]
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


def gone(pid: int) -> bool:
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_a_compilation_past_the_limit_is_killed_with_its_compiler(slow_compiler, tmp_path):
    form, problem, target, candidates = plans()
    with workers.Pool(1, seconds=4.0) as pool:
        (result,) = pool.compile(form, problem, target, candidates[:1])
        assert result[1].binary is None and "stopped after 4 s" in result[1].failure
    assert all(gone(pid) for pid in wait_for(slow_compiler))
    assert not list(tmp_path.glob("flashgen-*")), "the pool's folder, with the compiler's files, is gone"


def test_a_killed_worker_costs_its_candidate_alone(slow_compiler, tmp_path, monkeypatch):
    form, problem, target, candidates = plans()
    with workers.Pool(1) as pool:
        results = pool.compile(form, problem, target, candidates[:2])
        started = time.monotonic()
        import threading

        def kill() -> None:
            wait_for(slow_compiler)
            os.kill(pool._workers[0].process.pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        number, built = next(results)
        thread.join()
        assert number == 0 and "ended with status -9" in built.failure and time.monotonic() - started < 25
        monkeypatch.delenv("CXX")
        number, built = next(results)
        assert number == 1 and built.binary is not None, "a new worker took the next"
    assert not list(tmp_path.glob("flashgen-*")) and all(gone(pid) for pid in wait_for(slow_compiler))


def test_ctrl_c_leaves_cache_and_processes_clean(slow_compiler, tmp_path):
    program = f"""
import torch, flashgen
q = torch.randn(1, 2, 100, 32)
flashgen.autotune(flashgen.compile(flashgen.Variant(mask=flashgen.causal), plan={FEW}), q, q, q)
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs, a CI run among them, ignore it
    )  # fmt: skip
    pids = wait_for(slow_compiler)
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=60)
    assert "KeyboardInterrupt" in error and child.returncode != 0
    assert all(gone(pid) for pid in pids)
    held = tmp_path / "cache"
    assert not list(tmp_path.glob("flashgen-*")) and not list((held / "tmp").glob("*")) and not list((held / "tuning").glob("*"))


def test_workers_that_do_not_work_are_no_measurement(monkeypatch):
    monkeypatch.setattr(workers.sys, "executable", "/bin/false")
    with pytest.raises(flashgen.CompileError, match=r"none of 5 candidates compiled.*ended with status 1"):
        flashgen.autotune(flashgen.compile(CAUSAL, plan=FEW), *tensors(), progress=False)
    assert not list((cache.current().directory / "tuning").glob("*"))


def test_a_worker_needs_no_torch():
    program = workers._SERVE.replace("serve()", "print(sorted({'torch', 'cupy', 'cupy_backends'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", program, str(ROOT / "flashgen")], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_gpu_candidate_compiles_in_a_worker_without_a_gpu():
    pytest.importorskip("cupy_backends")
    problem, target = Problem("bfloat16", 64, 64, size="short"), targets.parse("sm90a")
    ranked = [c.plan for c in pipeline.ranked(CAUSAL.plain.form, problem, target, "sm80") if not c.rejected]
    with workers.Pool(1) as pool:
        (result,) = pool.compile(CAUSAL.plain.form, problem, target, ranked[:1])
    assert result[1].binary is not None and result[1].binary.kind == "cubin", result[1].failure


def test_plans_are_ranked_at_their_own_clocks(monkeypatch):
    """Plan 1 looks fast as long as it runs at the clock that plan 0 left, plan 2 does not, plan 3 is far off."""
    own, latest, since = {0: 1.0, 1: 1.03, 2: 0.9, 3: 2.0}, -1, 0

    def burst(number: int, calls: int) -> float:
        nonlocal latest, since
        latest, since = number, since + 1 if number == latest else 0
        return own[number] * (0.85 if number == 1 and since < 5 else 1.0)

    ticks = itertools.count()
    monkeypatch.setattr(tune.time, "perf_counter", lambda: next(ticks) * 1e-3)
    calls = dict.fromkeys(own, 10)
    in_turn = tune._rounds(burst, list(own), calls, 3)
    assert min(in_turn, key=lambda n: in_turn[n][0]) == 1
    found = tune._settled(burst, in_turn, calls, Effort(settling=0.01, settled_rounds=2))
    assert found == {0: [1.0] * 4, 1: [1.03] * 2, 2: [0.9] * 4}
