"""A Hugging Face model with flashgen's attention: a small random gpt-oss (sliding windows, sinks), compared with its eager attention.

    pip install transformers && python examples/hugging_face.py

Ends with an error if a result is off.
"""

import torch
from transformers import GptOssConfig, GptOssForCausalLM

import flashgen.hf  # noqa: F401 - registers attn_implementation="flashgen"

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32

torch.manual_seed(0)
config = GptOssConfig(
    vocab_size=256, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    num_local_experts=2, num_experts_per_tok=1, sliding_window=32, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    pad_token_id=0, eos_token_id=None,
)  # fmt: skip
model = GptOssForCausalLM(config).to(device, dtype).eval()  # or: GptOssForCausalLM.from_pretrained(name, attn_implementation="flashgen")

prompts = torch.randint(1, 256, (2, 100), device=device)
padding = torch.ones_like(prompts)
padding[0, :20] = 0  # the first prompt is shorter: padded on the left

model.set_attn_implementation("eager")
with torch.no_grad():
    expected = model(prompts, attention_mask=padding).logits[padding.bool()]
model.set_attn_implementation("flashgen")
with torch.no_grad():
    found = model(prompts, attention_mask=padding).logits[padding.bool()]
error = (found - expected).abs().max().item()
print(f"logits up to {expected.abs().max().item():.2f}, largest difference from eager {error:.1e}")
assert error < (5e-2 if dtype == torch.bfloat16 else 1e-5)

print("generated:", model.generate(prompts, attention_mask=padding, max_new_tokens=8, do_sample=False)[:, 100:].tolist())
