"""What the world calls the parts of a Transformer, and what they are called here: tables of patterns, no code.

A pattern has to match the whole of a lower-case tail: the last module of a parameter's path, or the last two.
"""

from __future__ import annotations

import re

# the prefixes and segments that wrappers add to a path
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"})
ADAPTERS = {
    "lora_A": ".lora_a",
    "lora_B": ".lora_b",
    "lora_embedding_A": ".lora_a",
    "lora_embedding_B": ".lora_b",
    "lora_magnitude_vector": ".lora_magnitude",
    "original_module": ".original",
}

CONTAINER = re.compile(r"(\w*_)?(layers?|blocks?|h|resblocks|layer_groups)")  # what a numbered layer lives in
LAYER_CLASS = re.compile(r"(Layer|Block)$")  # what an unnumbered layer is called
PROJECTION = re.compile(r"(.*\.)?(([qkv]|qkv)_proj|query|key|value|c_attn|qkv|w_?qkv|query_key_value)")
NORM_CLASS = re.compile(r"Norm")
ROUTER_CLASS = re.compile(r"Router")
ATTENTION = re.compile(r"att(n|ention)")
CROSS = re.compile(r"cross|enc_?dec|encoder_att")
SEQUENTIAL = re.compile(r"(mlp|ffn?|feed_?forward|net)\.\d+")
LAST_NORM = re.compile(r"full_layer_layer_norm")  # of ALBERT: registered first, applied last

Rules = dict[str, re.Pattern[str]]  # role -> tail


def _rules(**patterns: str) -> Rules:
    return {role.replace("__", "."): re.compile(rf"(.*\.)?({pattern})") for role, pattern in patterns.items()}


ATTENTION_ROLES = _rules(
    qkv=r"in_proj|c_attn|qkv(_proj)?|w_?qkv|to_qkv|query_key_value",
    q=r"q|q_(proj|lin|attn)|query(_proj|_layer)?|to_q|w_?q",
    k=r"k|k_(proj|lin)|key(_proj|_layer)?|to_k|w_?k",
    v=r"v|v_(proj|lin)|value(_proj|_layer)?|to_v|w_?v",
    o=r"o|o_proj|out(_proj|_lin)?|dense|c_proj|proj|to_out(\.0)?|w_?o",
    q_norm=r"(q|query)_(layer_?)?norm",
    k_norm=r"(k|key)_(layer_?)?norm",
    position=r"relative_(position|attention)_bias(_table)?",
    bias_k=r"bias_k",  # the extra key and value of nn.MultiheadAttention
    bias_v=r"bias_v",
)

FEED_FORWARD_ROLES = _rules(
    gate_up=r"gate_up(_proj)?",
    gate=r"gate_proj|wi_0",
    up=r"up(_proj)?|fc_?1|c_fc|fc_in|linear_?1|lin1|wi(_1)?|dense_h_to_4h|intermediate\.dense|ffn",
    down=r"down(_proj)?|fc_?2|fc_out|linear_?2|lin2|wo|dense_4h_to_h|c_proj|output\.dense|ffn_output",
)

NORM_ROLES = _rules(
    embed__norm=r"embed\w*\.\w*|\w*embed\w*|ln_pre|pre_la?yrnorm",
    head__norm=r"(transform|predictions|lm_head|head|classifier|generator_predictions)\.\w*|vocab_\w*",
    norm=r"\w+",
)

# outside of the layers; the first that matches
OUTER_ROLES = _rules(
    embed__position=r"wpe|(\w*_)?pos(_?\w*)?|(\w*_)?position(s|al)?(_\w*)?",
    embed__type=r"(token_type|segment)_embeddings?",
    embed__cls=r"cls_token|class_token|class_embedding",
    embed__mask=r"mask_token",
    embed__distillation=r"dist(illation)?_token",
    embed__project=r"embedding_hidden_mapping_in|embeddings_project|project_in",
    embed=r"wte|embed(_tokens|_in|ding|dings)?|(word|tok|token|patch)_embed(ding)?s?|tok_emb|shared"
    r"|patch_embed(ding)?s?\.proj(ection)?|conv_proj",
    unembed=r"lm_head|generator_lm_head|unembed(ding)?|embed_out|output_projection|proj_out|vocab_projector"
    r"|predictions(\.decoder)?|decoder",
    head__dense=r"(transform|predictions|lm_head|head|classifier|generator_predictions)\.dense|pre_classifier"
    r"|vocab_transform",
    head=r"head|heads|score|qa_outputs|classifier(\.out_proj)?",
    pooler=r"pooler(\.dense)?",
)

# a packed weight is cut into equal slices along its outputs ...
PACKED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}
# ... unless its heads are interleaved: [q₁ k₁ v₁ q₂ k₂ v₂ …]
INTERLEAVED = re.compile(r"(.*\.)?query_key_value")
INTERLEAVED_CLASS = re.compile(r"GPTBigCode|CodeGen")
