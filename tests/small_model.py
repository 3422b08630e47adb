"""One model, small enough to be built anew in every test; tests that need another one write the differences."""

from __future__ import annotations

from kvc_trt.models.config import ModelConfig

SMALL = ModelConfig(
    architecture="LlamaForCausalLM", dtype="float32", vocab_size=97, hidden_size=64, intermediate_size=96,
    num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_size=16, norm_epsilon=1e-5,
    rotary_base=10000.0, rotary_scaling=None, max_position_embeddings=8192, tie_word_embeddings=False,
    qkv_bias=False, output_bias=False, qk_norm=False, sliding_window=None, bos_token_id=None, eos_token_ids=(1,),
)  # fmt: skip
