"""Is a call of known shapes, which skips the checks, the same call? Each case runs the long way once and then again with other tensors."""

from __future__ import annotations

import pytest
import torch

import flashgen as fg
from flashgen import repeat

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
def test_unusual_gradients_of_a_known_shape(kind):
    attend = kernel()
    attend(*make(0))
    tensors = [t.requires_grad_() for t in make(1)]
    out = attend(*tensors)
    expected = torch.autograd.grad(out, tensors, torch.ones(out.shape), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out, tensors, GRADIENTS[kind](out)), expected))


def test_autocast_still_casts():
    attend = kernel()
    attend(*make(0))
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(*make(1)).dtype == torch.bfloat16
        attend(*make(1, torch.bfloat16))
        assert attend(*make(1, torch.bfloat16)).dtype == torch.bfloat16
    assert attend(*make(1)).dtype == torch.float32


def test_transforms_and_second_derivatives_are_still_refused():
    attend = kernel()
    attend(*make(0))
    q, k, v = make(1)
    with pytest.raises(fg.VariantError, match="vmap"):
        torch.func.vmap(attend)(q[None], k[None], v[None])
    q.requires_grad_()
    (gradient,) = torch.autograd.grad(attend(q, k, v).square().sum(), q, create_graph=True)
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
    for _ in range(2):
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
