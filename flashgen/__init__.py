"""flashgen: the compiler that writes flash-attention kernels for any variant.

``kernel = flashgen.compile(flashgen.Variant(mask=flashgen.causal)); out = kernel(q, k, v)``
"""

from .autotuner import TuneReport, autotune
from .catalogue import (
    alibi,
    bias,
    block_sparse,
    butterfly,
    causal,
    causal_top_left,
    chunked,
    dilated,
    document,
    from_dense,
    global_tokens,
    local_global,
    neighborhood,
    padding,
    prefix_lm,
    relative_bias,
    sliding_window,
    softcap,
    t5_bias,
)  # fmt: skip
from .errors import CompileError, DeviceError, DtypeError, FlashgenError, ShapeError, VariantError
from .flex import AuxOutput, AuxRequest, BlockMask, and_masks, create_block_mask, flex_attention, or_masks
from .kernel import Aux, Kernel, compile
from .language import input, kv_len, q_len
from .plot import mask_text, plot_mask
from .variant import Mask, Score, Variant, mask, score

__version__ = "0.1.0"
__all__ = [
    "Aux", "AuxOutput", "AuxRequest", "BlockMask", "CompileError", "DeviceError", "DtypeError", "FlashgenError", "Kernel", "Mask", "Score", "ShapeError",
    "TuneReport", "Variant", "VariantError", "alibi", "and_masks", "autotune", "bias", "block_sparse", "butterfly", "causal", "causal_top_left", "chunked",
    "compile", "create_block_mask", "dilated", "document", "flex_attention", "from_dense", "global_tokens", "input", "kv_len", "local_global", "mask",
    "mask_text", "neighborhood", "or_masks", "padding", "plot_mask", "prefix_lm", "q_len", "relative_bias", "score", "sliding_window", "softcap", "t5_bias",
]  # fmt: skip
