"""Do launches that may run at once have workspaces of their own, and those that may not, share them?"""

from __future__ import annotations

import threading

import torch

from flashgen.families import Workspace
from flashgen.workspaces import ALIGNMENT, KEPT_BYTES, Workspaces

CPU = torch.device("cpu")
COUNTER = Workspace("counter", "int32", 2, zeroed=True, kept=True)
SUM, ROWS = Workspace("sum", "float32", 100, zeroed=False), Workspace("rows", "float32", 10, zeroed=False)


def test_scratch_is_that_of_the_thread_and_stream_and_zeros_that_of_the_stream():
    first, second = Workspaces([SUM, COUNTER, ROWS], CPU), Workspaces([SUM, COUNTER], CPU)
    assert first.fields == ("counter", "sum", "rows")
    counter, total, rows = first.kept(1).addresses
    assert rows - total == -(-400 // ALIGNMENT) * ALIGNMENT
    assert second.kept(1).addresses == (counter, total), "passes of one thread on one stream run one after another"
    assert not set(first.kept(2).addresses) & {counter, total, rows}
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(first.kept(1)))
    thread.start()
    thread.join()
    assert elsewhere[0].addresses[0] == counter and not set(elsewhere[0].addresses[1:]) & {total, rows}


def test_launches_that_are_captured_have_their_own():
    workspaces = Workspaces([COUNTER, SUM], CPU)
    memories = [workspaces.kept(1), workspaces.allocate(), workspaces.allocate()]
    assert len({address for memory in memories for address in memory.addresses}) == 6
    assert all(not memory.held[0].any() for memory in memories)


def test_zeros_are_kept_beside_scratch_that_is_not():
    workspaces = Workspaces([COUNTER, Workspace("sum", "float32", KEPT_BYTES, zeroed=False)], CPU)
    first, again, captured = workspaces.allocate(1), workspaces.allocate(1), workspaces.allocate()
    assert first.addresses[0] == again.addresses[0] == Workspaces([COUNTER], CPU).kept(1).addresses[0]
    assert len({memory.addresses[1] for memory in (first, again, captured)}) == 3 and captured.addresses[0] != first.addresses[0]


def test_what_is_large_or_has_to_be_cleared_is_not_kept():
    assert Workspaces([Workspace("sum", "float32", KEPT_BYTES // 4, zeroed=False)], CPU).kept(1) is not None
    assert Workspaces([Workspace("sum", "float32", KEPT_BYTES // 4 + 1, zeroed=False)], CPU).kept(1) is None
    assert Workspaces([Workspace("sum", "float32", 4, zeroed=True)], CPU).kept(1) is None
    assert Workspaces([], CPU).kept(1).addresses == ()
