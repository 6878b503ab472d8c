"""Is a call of known shapes, which skips the checks, the same call? Each case runs the long way once and then again with other tensors."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import flashgen as fg
from flashgen import bound, repeat, runs
from flashgen.calls import Call
from flashgen.passes import Pass

LENGTH, DIM = 40, 16


def kernel() -> fg.Kernel:
    return fg.compile(fg.Variant(mask=fg.causal, score=fg.softcap(5.0)))


def make(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 2, LENGTH, DIM, generator=generator).to(dtype) for _ in range(3)]


LAYOUTS = {
    "contiguous": lambda q, k, v: (q, k, v),
    "blhd": lambda q, k, v: tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)),
    "packed": lambda q, k, v: torch.stack((q, k, v), 2).unbind(2),
    "shared_kv_head": lambda q, k, v: (q, k[:, :1], v[:, :1]),
}


@pytest.fixture
def counted(monkeypatch):
    """How many calls took the short way."""
    calls = []
    run = repeat.Repeat.run
    monkeypatch.setattr(repeat.Repeat, "run", lambda self, *a: calls.append(1) or run(self, *a))
    return calls


@pytest.mark.parametrize("layout", LAYOUTS)
def test_second_calls_take_the_short_way_and_agree(layout, counted):
    attend, grad_out = kernel(), torch.randn(2, 2, LENGTH, DIM)
    for seed in range(3):
        q, k, v = (t.detach().requires_grad_() for t in LAYOUTS[layout](*make(seed)))
        out = attend(q, k, v)
        expected = kernel()(q, k, v)
        assert torch.equal(out, expected) and out.stride() == expected.stride()
        for mine, other in zip(torch.autograd.grad(out, (q, k, v), grad_out), torch.autograd.grad(expected, (q, k, v), grad_out)):
            assert torch.equal(mine, other) and mine.stride() == other.stride()
    assert len(counted) == 2


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)])
def test_only_what_requires_grad_is_differentiated(wanted, counted):
    attend = kernel()
    for seed in range(2):
        tensors = [t.requires_grad_(w) for t, w in zip(make(seed), wanted)]
        attend(*tensors).square().sum().backward()
        assert [t.grad is not None for t in tensors] == list(wanted)
        expected = torch.autograd.grad(kernel()(*tensors).square().sum(), [t for t in tensors if t.requires_grad])
        assert all(torch.equal(t.grad, e) for t, e in zip([t for t in tensors if t.requires_grad], expected))
    assert len(counted) == 1


def shifted(t: torch.Tensor) -> torch.Tensor:
    """The same values four bytes off a 16-byte boundary."""
    return torch.empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


UNUSUAL = {
    "misaligned": lambda q: shifted(q),
    "negated_view": lambda q: torch._neg_view(-q),
    "parameter": lambda q: torch.nn.Parameter(q),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_tensors_of_a_known_shape(kind):
    attend = kernel()
    attend(*make(0))
    q, k, v = make(1)
    assert torch.equal(attend(UNUSUAL[kind](q), k, v), kernel()(q, k, v))


GRADIENTS = {
    "expanded": lambda out: torch.ones(()).expand(out.shape),
    "misaligned": lambda out: shifted(torch.ones(out.shape)),
    "negated_view": lambda out: torch._neg_view(-torch.ones(out.shape)),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_unusual_gradients_of_a_known_shape(kind, monkeypatch):
    long_ways = []
    computed = repeat.Backwards.computed
    monkeypatch.setattr(repeat.Backwards, "computed", lambda self, *a: long_ways.append(1) or computed(self, *a))
    attend = kernel()
    attend(*make(0))
    tensors = [t.requires_grad_() for t in make(1)]
    out = attend(*tensors)
    expected = torch.autograd.grad(out, tensors, torch.ones(out.shape), retain_graph=True)
    assert not long_ways
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out, tensors, GRADIENTS[kind](out)), expected))
    assert len(long_ways) == 1


def test_autocast_still_casts():
    attend = kernel()
    for _ in range(3):
        attend(*make(0))
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(*make(1)).dtype == torch.bfloat16
        for _ in range(3):
            assert attend(*make(1, torch.bfloat16)).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert attend(*make(1, torch.bfloat16)).dtype == torch.float16
    assert attend(*make(1)).dtype == torch.float32


def test_transforms_and_second_derivatives_are_still_refused():
    attend = kernel()
    attend(*make(0))
    for _ in range(2):  # a plain backward is known
        attend(*[t.requires_grad_() for t in make(1)]).square().sum().backward()
    q, k, v = make(1)
    with pytest.raises(fg.VariantError, match="vmap"):
        torch.func.vmap(attend)(q[None], k[None], v[None])
    with forward_ad.dual_level(), pytest.raises(fg.VariantError, match="forward-mode"):
        attend(forward_ad.make_dual(q, q), k, v)
    q, k, v = (t.requires_grad_() for t in make(1))
    out = attend(q, k, v)
    with forward_ad.dual_level(), pytest.raises(fg.VariantError, match="forward-mode"):
        torch.autograd.grad(out, q, forward_ad.make_dual(torch.ones(out.shape), torch.ones(out.shape)), retain_graph=True)
    for grad_out in (torch.ones(out.shape), torch.ones(out.shape, requires_grad=True)):
        (gradient,) = torch.autograd.grad(out, q, grad_out, create_graph=True)
        with pytest.raises(fg.VariantError, match="second derivative"):
            gradient.sum().backward()


def test_saved_tensors_may_come_back_elsewhere_in_memory():
    attend = kernel()
    attend(*make(0))
    q, k, v = (t.requires_grad_() for t in LAYOUTS["blhd"](*make(1)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().contiguous(), lambda t: t):
        hooked = torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))
    for mine, other in zip(hooked, torch.autograd.grad(attend(q, k, v).square().sum(), (q, k, v))):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("unpack", [lambda t: t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() == 3 else t, lambda t: torch._neg_view(-t)])
@pytest.mark.parametrize("known", [False, True])
def test_saved_statistics_may_come_back_elsewhere(unpack, known):
    attend, tensors = kernel(), [t.requires_grad_() for t in make(1)]
    plain = lambda: torch.autograd.grad(attend(*tensors).square().sum(), tensors)  # noqa: E731
    attend(*make(0))
    expected = plain() if known else torch.autograd.grad(kernel()(*tensors).square().sum(), tensors)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        hooked = plain()
    for gradients in (hooked, plain()):
        for mine, other in zip(gradients, expected):
            torch.testing.assert_close(mine, other)


def test_tensors_without_memory():
    attend = kernel()
    attend(*make(0))
    q, k, v = make(1)
    assert torch.equal(attend(torch._efficientzerotensor(q.shape, dtype=q.dtype), k, v), attend(torch.zeros_like(q), k, v))
    k.untyped_storage().resize_(0)
    with pytest.raises(fg.DeviceError, match="k has no memory"):
        attend(q, k, v)


def test_batched_gradients_are_refused():
    attend, tensors = kernel(), [t.requires_grad_() for t in make(1)]
    for _ in range(3):
        torch.autograd.grad(attend(*tensors).sum(), tensors)
        with pytest.raises(fg.VariantError, match="vmap"):
            torch.autograd.grad(attend(*tensors), tensors, torch.randn(3, *tensors[0].shape), is_grads_batched=True)


def test_dropout_is_checked_on_every_call():
    attend = kernel()
    for _ in range(2):
        for wrong in (None, "", False):
            with pytest.raises(fg.VariantError):
                attend(*make(0), dropout_p=wrong)
        attend(*make(0))


def test_wrong_shapes_are_still_refused():
    attend = kernel()
    attend(*make(0))
    q, k, v = make(1)
    with pytest.raises(fg.ShapeError):
        attend(q, k[:, :, :-1], v)
    with pytest.raises(fg.DtypeError):
        attend(q, k.double(), v)


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


OTHERS = {
    "shape": lambda q: q[:, :, 1:],
    "strides": lambda q: q.transpose(1, 2).contiguous().transpose(1, 2),
    "dtype": lambda q: q.double(),
    "device": lambda q: q.to("meta"),
    "requires_grad": lambda q: q.clone().requires_grad_(),
    "type": lambda q: torch.nn.Parameter(q, requires_grad=False),
    "negated": lambda q: torch._neg_view(-q),
    "without memory": lambda q: torch._efficientzerotensor(q.shape, dtype=q.dtype),
    "nothing": lambda q: None,
}
MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
    "dispatch": Passing,
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_recognizer_tells_other_tensors_apart(other):
    q, k, v = make(0)
    same = repeat.recognizer(q, k, v)
    assert same(q, k, v) and same(*make(1))
    assert not same(OTHERS[other](q), k, v) and not same(q, k, OTHERS[other](v))


@pytest.mark.parametrize("mode", MODES)
def test_a_recognizer_tells_modes_apart(mode):
    tensors = make(0)
    same = repeat.recognizer(*tensors)
    with MODES[mode]():
        assert not same(*tensors)
        inside = repeat.recognizer(*tensors)
        assert inside(*tensors)
    assert same(*tensors) and not inside(*tensors)


def test_a_recognizer_tells_transforms_apart():
    tensors = make(0)
    same, seen = repeat.recognizer(*tensors), []
    torch.func.vmap(lambda x: (seen.append(same(*tensors)), x)[1])(torch.ones(2))
    torch.func.grad(lambda x: (seen.append(same(*tensors)), x)[1])(torch.ones(()))
    assert seen == [False, False]


def test_changing_addresses_are_packed_anew(monkeypatch):
    monkeypatch.setattr(bound, "MAX_LAUNCHES", 2)
    repeat.forget()
    attend, other, held = kernel(), kernel(), []
    for seed in range(6):
        q, k, v = tensors = [t.requires_grad_() for t in make(seed)]
        held.append(tensors)
        with torch.no_grad():
            expected = fg.compile(fg.Variant(mask=fg.causal, score=fg.softcap(5.0)))(q, k, v)
        out = attend(q, k, v)
        assert torch.equal(out, expected)
        gradients = torch.autograd.grad(out.sum(), tensors)
        assert all(torch.equal(a, b) for a, b in zip(gradients, torch.autograd.grad(other(q, k.clone(), v).sum(), tensors)))
    assert sum(len(ready.launches) for ready in bound._all_ready) <= 2


def test_arguments_of_known_addresses_are_packed_once(monkeypatch):
    packed, pack = [], bound.Bound._packed
    monkeypatch.setattr(bound.Bound, "_packed", lambda self, *a: packed.append(a) or pack(self, *a))
    q, k, v = make(0)
    outs = [torch.empty(q.shape) for _ in range(2)]
    text, lse = fg.compile(fg.Variant())._handle(fg.Variant().plain.form.text, "dense", False, False), torch.empty(q.shape[:3])
    for out in outs * 2:
        call = Call(q, k, v, None, None, None, None, [], [], [], 0.25, LENGTH, LENGTH)
        runs.bind(Pass(text, call, {"q": q, "k": k, "v": v, "out": out}, lse, {"lse": lse})).launch(*[t.data_ptr() for t in (q, k, v, out, lse)])
    assert len(packed) == 2 and torch.equal(*outs) and torch.equal(outs[0], fg.compile(fg.Variant())(q, k, v))


def test_what_is_remembered_is_forgotten(counted):
    attend = kernel()
    for _ in range(3):
        attend(*make(0))
    repeat.forget()
    attend(*make(0))
    assert len(counted) == 2
    attend(*make(0))
    assert len(counted) == 3


def test_only_what_requires_grad_is_computed(monkeypatch):
    launched, start = [], bound.Bound.launch
    monkeypatch.setattr(bound.Bound, "launch", lambda self, *a: launched.append(self.given) or start(self, *a))
    attend = kernel()
    for seed in range(3):
        for wanted in ((True, True, True), (False, True, False)):
            tensors = [t.requires_grad_(w) for t, w in zip(make(seed), wanted)]
            attend(*tensors).square().sum().backward()
            assert [t.grad is not None for t in tensors] == list(wanted)
            assert tuple(name in launched[-1] for name in ("dq", "dk", "dv")) == wanted


@pytest.mark.parametrize("wanted", [(0,), (1, 2), (0, 1, 2)])
def test_one_graph_serves_several_backwards(wanted):
    attend = kernel()
    for seed in range(3):
        tensors = [t.requires_grad_() for t in make(seed)]
        out = attend(*tensors).square().sum()
        every = torch.autograd.grad(out, tensors, retain_graph=True)
        some = torch.autograd.grad(out, [tensors[n] for n in wanted], retain_graph=True)
        again = torch.autograd.grad(out, tensors)
        assert all(torch.equal(every[n], g) for n, g in zip(wanted, some)) and all(torch.equal(a, b) for a, b in zip(every, again))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out, tensors)


def test_a_saved_tensor_changed_in_place_is_told():
    attend = kernel()
    for _ in range(3):
        q, k, v = (t.requires_grad_() for t in make(1))
        out = attend(q, k, v).sum()
        torch.autograd.grad(out, q, retain_graph=True)
        with torch.no_grad():
            k.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, q)


def test_tensors_of_another_device_than_the_current_one(monkeypatch, counted):
    current, seen = [1], []

    class Device:
        def __init__(self, number: int):
            self.number, self.before = number, current[0]

        def __enter__(self) -> None:
            current[0] = self.number

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    loaded, launch, made = runs._loaded, bound.Bound.launch, repeat._made
    state = lambda work: loaded(work).state._replace(current=lambda: current[0])  # noqa: E731
    monkeypatch.setattr(runs, "_loaded", lambda work: replace(loaded(work), state=state(work)))
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(bound.Bound, "launch", lambda self, *a: seen.append(current[0]) or launch(self, *a))
    monkeypatch.setattr(repeat, "_made", lambda *a: lambda: seen.append(current[0]) or made(*a)())
    repeat.forget()
    attend = kernel()
    for seed in range(4):
        tensors = [t.requires_grad_() for t in make(seed)]
        torch.autograd.grad(attend(*tensors).square().sum(), tensors)
    assert len(counted) == 3 and len(seen) == 2 + 3 * 7 and not any(seen) and current == [1]
    repeat.forget()


def test_compiled_autograd_takes_the_operator(counted):
    attend = kernel()
    for seed in range(3):
        tensors = [t.requires_grad_() for t in make(seed)]
        out = attend(*tensors).square().sum()
        expected = torch.autograd.grad(out, tensors, retain_graph=True)
        with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
            out.backward()
        assert all(torch.equal(t.grad, e) for t, e in zip(tensors, expected))
    assert len(counted) == 2


def test_threads_repeat_one_call_at_once():
    attend, wrong = kernel(), []
    attend(*make(0))

    def work(seed: int) -> None:
        tensors = [t.requires_grad_() for t in make(seed)]
        expected = torch.autograd.grad(kernel()(*tensors).square().sum(), tensors)
        for _ in range(50):
            if not all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(attend(*tensors).square().sum(), tensors), expected)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
