"""Do Hugging Face models with ``attn_implementation="flashgen"`` agree with their eager attention? Small random models, on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

import flashgen  # noqa: E402 - after the skip
import flashgen.hf as hf  # noqa: E402

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
LENGTH, WINDOW, CHUNK = 40, 8, 16
CONFIGS = {
    "Llama": lambda: transformers.LlamaConfig(**SHAPE),
    "Mistral": lambda: transformers.MistralConfig(**SHAPE, sliding_window=WINDOW),
    "Gemma2": lambda: transformers.Gemma2Config(**SHAPE, sliding_window=WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=2.0),
    "GptOss": lambda: transformers.GptOssConfig(**SHAPE, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1, rope_parameters=ROPE),
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def make(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = CONFIGS[name]()
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # larger than the initial weights, so that attention is far from uniform
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def pair(request):
    eager = make(request.param)
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("flashgen")
    assert ours.config._attn_implementation == "flashgen", "not another implementation instead"
    return eager, ours


def tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(1))


def padding(kind: str) -> torch.Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if kind == "left":
        mask[0, :7] = 0
    if kind == "right":
        mask[1, -9:] = 0
    return mask


def documents() -> torch.Tensor:
    """Position ids of two rows in which sequences are packed."""
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((12, 3, 25), (20, 20))])


def calls() -> dict[str, dict]:
    batch_mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    batch_mask[1, :, :, 5:9] = False
    batch_mask[1, :, 5:9, 0] = True
    additive = torch.where(batch_mask, 0.0, torch.finfo(torch.float32).min)
    return {
        "plain": {}, "left padding": {"attention_mask": padding("left")}, "right padding": {"attention_mask": padding("right")},
        "packed": {"position_ids": documents(), "use_cache": False}, "a prepared mask": {"attention_mask": {"full_attention": additive}},
    }  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("kind", calls())
def test_logits_agree_with_eager(pair, kind):
    eager, ours = pair
    call = calls()[kind]
    if kind == "a prepared mask":
        additive = call["attention_mask"]["full_attention"]
        kinds = set(getattr(eager.config, "layer_types", None) or ["full_attention"])
        call = {"attention_mask": additive if kinds == {"full_attention"} else dict.fromkeys(kinds, additive)}
    expected, found = (model(tokens(), **call).logits for model in (eager, ours))
    real = padding(kind.split()[0]).bool() if "padding" in kind else torch.ones(2, LENGTH, dtype=torch.bool)
    torch.testing.assert_close(found[real], expected[real], atol=1e-5, rtol=1e-5)
    assert expected.std() > 0.1, "logits that tell something"


def test_gradients_agree_with_eager(pair):
    gradients = []
    labels = tokens()
    labels[0, :8] = -100  # what padding predicts counts for nothing
    for model in pair:
        model.zero_grad()
        model(tokens(), labels=labels, attention_mask=padding("left")).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    eager, ours = gradients
    assert eager.keys() == ours.keys()
    for name, expected in eager.items():
        torch.testing.assert_close(ours[name], expected, atol=2e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
    assert any("sinks" in name for name in ours) == ("GptOss" in type(pair[0]).__name__)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_a_cache_agrees_with_eager(pair, cache):
    found = []
    for model in pair:
        options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True, "disable_compile": True}
        made = model.generate(tokens(length=11), attention_mask=padding("left")[:, :11], cache_implementation=cache, **options)
        found.append((made.sequences, torch.stack(made.logits)))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[1][1], found[0][1], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_bfloat16_is_as_exact_as_eager(pair):
    """The judge of the kernels: the mean error against exact arithmetic is at most 1.1 times that of eager attention in bfloat16."""
    eager, ours = (copy.deepcopy(model).bfloat16() for model in pair)
    real = torch.float32 if "GptOss" in type(eager).__name__ else torch.float64  # the experts of gpt-oss compute in float32 at most
    exact = copy.deepcopy(eager).to(real)
    given = tokens(batch=8, length=100)
    reference, plain, found = (model(given).logits.double() for model in (exact, eager, ours))
    ratio = ((found - reference).abs().mean() / (plain - reference).abs().mean()).item()
    print(f"{type(eager).__name__}: error {ratio:.3f} times eager's")
    assert ratio <= 1.1


@pytest.mark.slow
def test_a_compiled_and_a_checkpointed_model_agree_with_the_plain_one():
    model = make("Mistral")
    model.set_attn_implementation("flashgen")
    given = {"input_ids": tokens(), "attention_mask": padding("left"), "labels": tokens(), "use_cache": False}

    def gradient(run) -> torch.Tensor:
        model.zero_grad()
        run(**given).loss.backward()
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    expected = gradient(model)
    torch.testing.assert_close(gradient(torch.compile(model, backend="aot_eager")), expected)
    model.gradient_checkpointing_enable()
    model.train()
    torch.testing.assert_close(gradient(model), expected)


@torch.no_grad()
def test_chunked_attention_agrees_with_eager():
    """The mask of Llama 4, on the attention function itself; rows with left padding start their chunks after it."""
    from transformers.masking_utils import create_chunked_causal_mask

    config = CONFIGS["Llama"]()
    config.attention_chunk_size = CHUNK
    q, k, v = (torch.randn(2, heads, LENGTH, 16) for heads in (4, 2, 2))
    module = torch.nn.Module()
    for mask in (None, padding("left")):
        config._attn_implementation = "flashgen"
        given = create_chunked_causal_mask(config, torch.zeros(2, LENGTH, 32), mask, None)
        out, _ = hf.attention(module, q, k, v, given, scaling=0.25)
        config._attn_implementation = "eager"
        additive = create_chunked_causal_mask(config, torch.zeros(2, LENGTH, 32), mask, None)
        scores = q @ k.repeat_interleave(2, 1).mT * 0.25 + additive
        expected = (torch.softmax(scores, -1) @ v.repeat_interleave(2, 1)).transpose(1, 2)
        real = padding("left").bool() if mask is not None else torch.ones(2, LENGTH, dtype=torch.bool)
        torch.testing.assert_close(out[real], expected[real], atol=1e-5, rtol=1e-5)
        seen = (torch.softmax(scores, -1) > 0).sum(-1).transpose(1, 2)[real]
        assert seen.max() == CHUNK and seen.min() == 1, "chunks there are"


@torch.no_grad()
def test_a_bias_of_positions_and_a_bool_mask_are_taken():
    q, k, v = (torch.randn(2, 4, 12, 16) for _ in range(3))
    bias, mask = torch.randn(1, 4, 12, 12), torch.rand(2, 1, 12, 12) > 0.3
    mask[..., 0] = True
    out, _ = hf.attention(torch.nn.Module(), q, k, v, mask, scaling=0.25, softcap=3.0, position_bias=bias)
    scores = (3.0 * torch.tanh(q @ k.mT * 0.25 / 3.0) + bias).masked_fill(~mask, float("-inf"))
    torch.testing.assert_close(out, (torch.softmax(scores, -1) @ v).transpose(1, 2), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_steps_of_a_generation_share_one_causal_mask():
    assert hf.mask(2, 5, 5) is hf.mask(2, 1, 9, q_offset=8) is hf.CAUSAL
    assert hf.mask(2, 5, 9) is not hf.CAUSAL, "a static cache, filled to 5 of 9"
    all_real = torch.ones(2, 5, dtype=torch.bool)
    assert hf.mask(2, 5, 5, attention_mask=all_real) is hf.CAUSAL


def test_what_is_not_supported_is_said():
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(flashgen.VariantError, match=r"output_attentions=True.*eager"):
        hf.attention(torch.nn.Module(), q, q, q, None, output_attentions=True)


@torch.no_grad()
def test_dropout_is_the_kernels():
    q = torch.randn(1, 2, 200, 16)
    plain, dropped, all_dropped = (hf.attention(torch.nn.Module(), q, q, torch.ones_like(q), None, dropout=p)[0] for p in (0.0, 0.4, 1.0))
    torch.testing.assert_close(plain, torch.ones_like(plain))
    assert not torch.equal(dropped, plain) and abs(dropped.mean().item() - 1) < 0.1 and not all_dropped.any()


def test_the_module_may_be_loaded_again():
    import importlib

    importlib.reload(hf)
    assert not hf._asked_for_flash_attention(None, "flashgen") and hf._asked_for_flash_attention(None, "flash_attention_2")
