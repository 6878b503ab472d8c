"""Do repeated calls on a GPU keep out of each other's way? Streams, threads and CUDA graphs that share what is kept between launches."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import flashgen as fg

pytestmark = pytest.mark.gpu
LENGTHS = (128, 100)
ROUNDS = 40


def make(seed: int, length: int = 128) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(1, 2, length, 64, device="cuda", generator=generator).bfloat16().requires_grad_() for _ in range(4)]


def run(attend: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> list[torch.Tensor]:
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout.detach())]


def expected(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """By a kernel without a history; deterministic, so that results can be compared bit by bit."""
    return run(kernel(), *tensors)


def kernel() -> fg.Kernel:
    return fg.compile(fg.Variant(mask=fg.causal), deterministic=True)


def eager(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def agree(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
def test_repeated_calls_agree_with_eager_attention(deterministic):
    attend = fg.compile(fg.Variant(mask=fg.causal), deterministic=deterministic)
    for seed in range(8):
        tensors = make(seed)
        for found, exact in zip(
            run(attend, *tensors), run(lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), *tensors)
        ):
            torch.testing.assert_close(found, exact, atol=3e-2, rtol=3e-2)


def test_streams_at_once():
    attend, streams = kernel(), [torch.cuda.Stream() for _ in range(3)]
    inputs = [make(n, LENGTHS[n % 2]) for n in range(len(streams))]
    wanted = [expected(tensors) for tensors in inputs]
    torch.cuda.synchronize()
    found = []
    for _ in range(ROUNDS):
        for stream, tensors in zip(streams, inputs):
            with torch.cuda.stream(stream):
                found.append(run(attend, *tensors))
    torch.cuda.synchronize()
    assert all(agree(results, wanted[n % len(streams)]) for n, results in enumerate(found))


@pytest.mark.parametrize("own_stream", [False, True])
def test_threads_at_once(own_stream):
    attend, wrong = kernel(), []

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
            tensors = make(seed, LENGTHS[seed % 2])
            wanted = expected(tensors)
            results = [run(attend, *tensors) for _ in range(ROUNDS)]
            # One thread differentiates on its own thread, beside autograd's.
            with torch.autograd.set_multithreading_enabled(False):
                results += [run(attend, *tensors) for _ in range(ROUNDS)]
            if not all(agree(found, wanted) for found in results):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_graphs_replayed_beside_calls():
    attend, streams = kernel(), [torch.cuda.Stream() for _ in range(2)]
    inputs = [make(n) for n in range(3)]
    for _ in range(3):  # warm-up; what is kept for the stream that captures is made too
        with torch.cuda.stream(streams[0]):
            run(attend, *inputs[0])
    torch.cuda.synchronize()
    graphs, found = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph, tensors in zip(graphs, inputs):
        with torch.cuda.graph(graph, stream=streams[0]):
            found.append(run(attend, *tensors))
    for _ in range(ROUNDS):
        for tensors, seed in zip(inputs, range(3)):
            for t in tensors:
                with torch.no_grad():
                    t.copy_(make(seed + 7)[0])
        for graph, stream in zip(graphs, streams):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.replay()
        beside = run(attend, *inputs[2])
        torch.cuda.synchronize()
        for results, tensors in zip([*found, beside], inputs):
            assert agree(results, expected(tensors))


def test_saved_tensors_that_hooks_replace():
    attend, tensors = kernel(), make(0)
    wanted = expected(tensors)
    for _ in range(3):
        assert agree(run(attend, *tensors), wanted)
        with torch.autograd.graph.save_on_cpu():
            assert agree(run(attend, *tensors), wanted)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)):
            out = attend(*tensors[:3])
            assert agree([out.detach(), *torch.autograd.grad(out, tensors[:3], tensors[3].detach())], wanted)
