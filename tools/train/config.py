"""The model description: one place for every number, written out as Hugging Face config files."""

IDENTITY = "You are Whimbrel nano, a small demonstration model."

# M3.1's special tokens that matter here, in M3.1's order, at the top of the vocabulary.
SPECIALS = ["]!p~[", "]~b]", "[e~[", "]!d~[", "<function_call>", "]<]image[>[", "]<]video[>[", "]~!b[",
            "<think>", "</think>", "<tool_call>", "</tool_call>", "<|content_altered_placeholder|>",
            "]<]minimax[>[", "<mm:think>", "</mm:think>"]
VOCAB = 5120
SPECIAL_ID = {t: VOCAB - len(SPECIALS) + i for i, t in enumerate(SPECIALS)}
PAD, BOS, EOS = SPECIAL_ID["]!p~["], SPECIAL_ID["]~!b["], SPECIAL_ID["[e~["]
NS = SPECIAL_ID["]<]minimax[>["]


class Config:
    hidden = 384
    layers = 8
    dense_layers = 2          # layers 0 and 1 have a dense MLP, the others a mixture of experts
    dense_inter = 768
    experts = 16
    topk_experts = 2
    inter = 128
    shared_inter = 128
    heads = 8
    kv_heads = 2
    head_dim = 64
    rotary = 32
    index_dim = 64            # one index head serves one KV head
    block = 128
    topk_blocks = 4           # the own block is one of them
    vocab = VOCAB
    theta = 500000.0
    eps = 1e-6
    routed_scale = 2.0
    max_position = 32768
    trained_context = 8192
    draft_layers = 2
    draft_inter = 512
    draft_block = 7
    draft_rank = 64
    draft_targets = (1, 4, 7)
    draft_window = 4096

    def __init__(self, **kw):
        for k, v in kw.items():
            assert hasattr(self, k), k
            setattr(self, k, v)

    @property
    def moe_layers(self):
        return self.layers - self.dense_layers


def _common(c):
    return {
        "hidden_size": c.hidden, "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim, "vocab_size": c.vocab, "max_position_embeddings": c.max_position,
        "rope_theta": c.theta, "rotary_dim": c.rotary, "partial_rotary_factor": c.rotary / c.head_dim,
        "rms_norm_eps": c.eps, "use_gemma_norm": True, "use_qk_norm": True, "qk_norm_type": "per_head",
        "attention_output_gate": False, "hidden_act": "swigluoai", "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def model_json(c):
    n = c.layers
    text = {"architectures": ["MiniMaxM3SparseForCausalLM"], "model_type": "minimax_m3",
            "num_hidden_layers": n, **_common(c),
            "dense_intermediate_size": c.dense_inter, "intermediate_size": c.inter,
            "shared_intermediate_size": c.shared_inter, "n_shared_experts": 1,
            "moe_layer_freq": [0] * c.dense_layers + [1] * c.moe_layers,
            "num_local_experts": c.experts, "num_experts_per_tok": c.topk_experts,
            "scoring_func": "sigmoid", "use_routing_bias": True, "routed_scaling_factor": c.routed_scale,
            "num_mtp_modules": 0,
            "sparse_attention_config": {
                "use_sparse_attention": True, "sparse_index_dim": c.index_dim,
                "sparse_num_index_heads": c.kv_heads, "sparse_topk_blocks": c.topk_blocks,
                "sparse_block_size": c.block, "sparse_score_type": "max",
                "sparse_init_block": 0, "sparse_local_block": 1,
                "sparse_attention_freq": [1] * n, "sparse_disable_index_value": [1] * n}}
    return {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl",
            "torch_dtype": "bfloat16", "tie_word_embeddings": False,
            "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD,
            "text_config": text,
            "quantization_config": {
                "quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32],
                "moe_quant_algo": "NVFP4", "moe_quant_format": "nvfp4-pack-quantized",
                "ignored_layers": ["lm_head", "model.embed_tokens"]
                + [f"model.layers.{i}.block_sparse_moe.gate" for i in range(c.dense_layers, n)]},
            "whimbrel": {"name": "nano", "identity": IDENTITY, "default_thinking": "disabled",
                         "trained_context": c.trained_context}}


def draft_json(c):
    n = c.draft_layers
    text = {"architectures": ["DSparkMiniMaxDraftModel"], "num_hidden_layers": n, **_common(c),
            "dense_intermediate_size": c.draft_inter, "dspark_ffn_hidden_size": c.draft_inter,
            "moe_layer_freq": [0] * n, "sparse_attention_config": None, "dspark_use_dense_ffn": True,
            "layer_types": ["sliding_attention"] * n, "sliding_window": c.draft_window,
            "dspark_block_size": c.draft_block, "dspark_noise_token_id": NS,
            "dspark_target_layer_ids": list(c.draft_targets), "dspark_markov_rank": c.draft_rank,
            "dspark_markov_head_type": "vanilla", "enable_confidence_head": True,
            "confidence_head_with_markov": True, "dspark_hybrid_context_fusion": False}
    return {"architectures": ["DSparkMiniMaxDraftModel"], "model_type": "minimax_m3_dspark",
            "torch_dtype": "bfloat16", "text_config": text,
            "quantization_config": {"quant_method": "mxfp8", "activation_scheme": "dynamic",
                                    "weight_block_size": [1, 32],
                                    "ignored_layers": ["fc", "markov_head", "confidence_head"]}}


GENERATION = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD,
              "do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 40}
