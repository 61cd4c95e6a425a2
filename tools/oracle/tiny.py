"""Writes the random tiny checkpoints under tests/vectors: `tiny` in M3.1's formats and `tiny-m3` with BF16 and F32
weights, M3's dense attention in its first layer, and two shards. Deterministic.

    python3 tools/oracle/tiny.py tests/vectors

Shapes are as small as the formats allow; top-k 4 of 128-token blocks makes sparsity act beyond 512 tokens. Weights are
normal with deviation 1/sqrt(inputs), so activations keep their size through the layers."""
import json
import os
import sys

import numpy as np

import formats as fmt
import tensors as st

SPECIALS = ["]!p~[", "]~b]", "[e~[", "<tool_call>", "</tool_call>", "]~!b[", "]<]minimax[>[", "<mm:think>", "</mm:think>"]
SPLIT = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# Merges by hand, in order of rank; the pieces on both sides exist before they are joined.
MERGES = """Ġ t|h e|i n|Ġ a|Ġt he|o n|r e|Ġ w|e r|a t|Ġ s|o u|i s|e n|Ġ o|Ġ c|o r|e s|Ġ f|in g|Ġ p|e d|a n|a l|a r|i t|Ġ m
Ġ b|l e|o m|Ġo f|Ġa nd|i c|Ġ d|a s|l l|Ġt o|r o|Ġ in|c t|Ġ n|i on|s t|Ġ h|v e|Ġy ou|Ġ re|0 0|Ġ e|> <|Ã ©|, Ġ|Ċ Ċ
u r|Ġf or""".replace("\n", "|").split("|")


def byte_letters():
    """The byte-level alphabet of GPT-2: printable bytes stand for themselves, the rest for U+0100 and up."""
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    letters, extra = {}, 0
    for b in range(256):
        if b in keep:
            letters[b] = chr(b)
        else:
            letters[b] = chr(256 + extra)
            extra += 1
    return letters


def tokenizer():
    vocab = {letter: i for i, letter in enumerate(sorted(byte_letters().values()))}
    merges = []
    for line in MERGES:
        a, b = line.split(" ")
        if a in vocab and b in vocab and a + b not in vocab:
            vocab[a + b] = len(vocab)
            merges.append(f"{a} {b}")
    size = 320
    filler = size - len(SPECIALS) - len(vocab)
    assert filler >= 0, filler
    for i in range(filler):             # ids that no text reaches, so that the vocabulary has its size
        vocab[f"<unused{i}>"] = len(vocab)
    added = [{"id": len(vocab) + i, "content": s, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": s not in ("<tool_call>", "</tool_call>", "<mm:think>", "</mm:think>")}
             for i, s in enumerate(SPECIALS)]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": vocab, "merges": merges}
    pre = {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": pre, "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": model}


def special(name):
    return 320 - len(SPECIALS) + SPECIALS.index(name)


class Writer:
    """Draws weights and stores them in the formats of the release."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.out = {}

    def normal(self, shape, deviation):
        return (self.rng.standard_normal(shape) * deviation).astype(np.float32)

    def bf16(self, name, shape, deviation):
        self.out[name] = st.Tensor("BF16", fmt.bf16_bits(self.normal(shape, deviation)))

    def f32(self, name, shape, deviation):
        self.out[name] = self.normal(shape, deviation)

    def mxfp8(self, name, rows, cols, gain=1.0):
        elements, scales = fmt.mxfp8_encode(self.normal((rows, cols), gain * cols ** -0.5))
        self.out[name + ".weight"] = st.Tensor("F8_E4M3", elements)
        self.out[name + ".weight_scale_inv"] = scales

    def nvfp4(self, names, rows, cols):
        """Matrices that share one global scale, as w1 and w3 of one expert do."""
        drawn = [self.normal((rows, cols), cols ** -0.5) for _ in names]
        total = np.float32(2688) / np.float32(max(abs(w).max() for w in drawn))
        for name, w in zip(names, drawn):
            packed, scales = fmt.nvfp4_weight_encode(w, total)
            self.out[name + ".weight_packed"] = packed
            self.out[name + ".weight_scale"] = st.Tensor("F8_E4M3", scales)
            self.out[name + ".weight_global_scale"] = np.array([total], np.float32)
            self.out[name + ".input_global_scale"] = np.array([448], np.float32)


COMMON = {"head_dim": 32, "vocab_size": 320, "max_position_embeddings": 32768, "rope_theta": 10000.0, "rotary_dim": 16,
          "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6, "use_gemma_norm": True, "use_qk_norm": True,
          "qk_norm_type": "per_head", "attention_output_gate": False, "hidden_act": "swigluoai", "swiglu_alpha": 1.702,
          "swiglu_limit": 7.0, "tie_word_embeddings": False}


def text_config(hidden, layers, dense, moe, shared, moe_freq, sparse_freq, **more):
    return {"architectures": ["MiniMaxM3SparseForCausalLM"], "hidden_size": hidden, "num_hidden_layers": layers,
            "num_attention_heads": 4, "num_key_value_heads": 2, **COMMON, "dense_intermediate_size": dense,
            "intermediate_size": moe, "shared_intermediate_size": shared, "n_shared_experts": 1,
            "moe_layer_freq": moe_freq, "num_local_experts": 4, "num_experts_per_tok": 2, "scoring_func": "sigmoid",
            "use_routing_bias": True, "routed_scaling_factor": 2.0,
            "sparse_attention_config": {
                "use_sparse_attention": True, "sparse_index_dim": 32, "sparse_num_index_heads": 2,
                "sparse_topk_blocks": 4, "sparse_block_size": 128, "sparse_score_type": "max", "sparse_init_block": 0,
                "sparse_local_block": 1, "sparse_attention_freq": sparse_freq,
                "sparse_disable_index_value": sparse_freq}, **more}


def root_config(text, **more):
    return {"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "model_type": "minimax_m3_vl",
            "torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": special("]~!b["),
            "eos_token_id": special("[e~["), "text_config": text, **more}


def save_json(path, value):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f, indent=1, ensure_ascii=False)
        f.write("\n")


def save_tokenizer(folder):
    save_json(os.path.join(folder, "tokenizer.json"), tokenizer())
    save_json(os.path.join(folder, "generation_config.json"),
              {"bos_token_id": special("]~!b["), "eos_token_id": special("[e~["), "do_sample": True,
               "temperature": 1.0, "top_p": 0.95, "top_k": 40})


def write_tiny(folder):
    hidden, layers, dense, moe, shared = 128, 4, 64, 64, 32
    w = Writer(20261202)
    w.bf16("language_model.model.embed_tokens.weight", (320, hidden), 1.0)
    w.bf16("language_model.lm_head.weight", (320, hidden), 2 * hidden ** -0.5)
    w.bf16("language_model.model.norm.weight", (hidden,), 0.1)
    for i in range(layers):
        p = f"language_model.model.layers.{i}."
        w.bf16(p + "input_layernorm.weight", (hidden,), 0.1)
        w.bf16(p + "post_attention_layernorm.weight", (hidden,), 0.1)
        for n in ("q_norm", "k_norm", "index_q_norm", "index_k_norm"):
            w.bf16(p + f"self_attn.{n}.weight", (32,), 0.2)
        for n, rows, cols in (("q", 128, hidden), ("k", 64, hidden), ("v", 64, hidden), ("o", hidden, 128),
                              ("index_q", 64, hidden), ("index_k", 32, hidden)):
            w.mxfp8(p + f"self_attn.{n}_proj", rows, cols)
        if i == 0:
            for n, rows, cols in (("gate", dense, hidden), ("up", dense, hidden), ("down", hidden, dense)):
                w.mxfp8(p + f"mlp.{n}_proj", rows, cols)
            continue
        m = p + "block_sparse_moe."
        w.f32(m + "gate.weight", (4, hidden), 2 * hidden ** -0.5)
        w.f32(m + "e_score_correction_bias", (4,), 0.05)
        for n, rows, cols in (("gate", shared, hidden), ("up", shared, hidden), ("down", hidden, shared)):
            w.mxfp8(m + f"shared_experts.{n}_proj", rows, cols)
        for e in range(4):
            x = m + f"experts.{e}."
            w.nvfp4([x + "w1", x + "w3"], moe, hidden)
            w.nvfp4([x + "w2"], hidden, moe)
    os.makedirs(os.path.join(folder, "dspark"), exist_ok=True)
    st.write(os.path.join(folder, "model.safetensors"), w.out, {"format": "pt"})
    quant = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32],
             "moe_quant_algo": "NVFP4", "moe_quant_format": "nvfp4-pack-quantized"}
    save_json(os.path.join(folder, "config.json"),
              root_config(text_config(hidden, layers, dense, moe, shared, [0, 1, 1, 1], [1] * layers),
                          quantization_config=quant))
    save_tokenizer(folder)

    d = Writer(20261203)
    p = "language_model.model.dspark."
    d.bf16(p + "fc.weight", (hidden, 3 * hidden), (3 * hidden) ** -0.5)
    d.bf16(p + "hidden_norm.weight", (hidden,), 0.1)
    d.bf16(p + "final_norm.weight", (hidden,), 0.1)
    d.bf16(p + "markov_head.markov_w1.weight", (320, 16), 1.0)
    d.bf16(p + "markov_head.markov_w2.weight", (320, 16), 0.25)
    d.bf16(p + "confidence_head.proj.weight", (1, hidden + 16), (hidden + 16) ** -0.5)
    d.bf16(p + "confidence_head.proj.bias", (1,), 0.1)
    for i in range(2):
        q = p + f"layers.{i}.decoder_layer."
        d.bf16(q + "input_layernorm.weight", (hidden,), 0.1)
        d.bf16(q + "post_attention_layernorm.weight", (hidden,), 0.1)
        d.bf16(q + "self_attn.q_norm.weight", (32,), 0.2)
        d.bf16(q + "self_attn.k_norm.weight", (32,), 0.2)
        for n, rows, cols in (("q", 128, hidden), ("k", 64, hidden), ("v", 64, hidden), ("o", hidden, 128)):
            d.mxfp8(q + f"self_attn.{n}_proj", rows, cols)
        for n, rows, cols in (("gate", 64, hidden), ("up", 64, hidden), ("down", hidden, 64)):
            d.mxfp8(q + f"mlp.{n}_proj", rows, cols)
    st.write(os.path.join(folder, "dspark", "model.safetensors"), d.out, {"format": "pt"})
    text = text_config(hidden, 2, 64, moe, shared, [0, 0], [], layer_types=["sliding_attention"] * 2,
                       sliding_window=256, dspark_block_size=7, dspark_noise_token_id=special("]<]minimax[>["),
                       dspark_target_layer_ids=[0, 2, 3], dspark_markov_rank=16, dspark_markov_head_type="vanilla",
                       enable_confidence_head=True, confidence_head_with_markov=True, dspark_ffn_hidden_size=64,
                       dspark_use_dense_ffn=True, dspark_hybrid_context_fusion=False,
                       dspark_config={"hybrid_context_fusion": False})
    text["sparse_attention_config"] = None
    save_json(os.path.join(folder, "dspark", "config.json"),
              {"architectures": ["DSparkMiniMaxDraftModel"], "text_config": text,
               "quantization_config": {"quant_method": "mxfp8", "activation_scheme": "dynamic",
                                       "weight_block_size": [1, 32]}})


def write_tiny_m3(folder):
    hidden, dense, moe, shared = 64, 64, 32, 32
    w = Writer(20261204)
    w.bf16("language_model.model.embed_tokens.weight", (320, hidden), 1.0)
    w.bf16("language_model.lm_head.weight", (320, hidden), 2 * hidden ** -0.5)
    w.bf16("language_model.model.norm.weight", (hidden,), 0.1)
    for i in range(3):
        p = f"language_model.model.layers.{i}."
        linear = w.f32 if i == 2 else w.bf16           # the last layer stores F32
        index = ("index_q", "index_k") if i else ()
        w.bf16(p + "input_layernorm.weight", (hidden,), 0.1)
        w.bf16(p + "post_attention_layernorm.weight", (hidden,), 0.1)
        for n in ("q_norm", "k_norm") + tuple(x + "_norm" for x in index):
            w.bf16(p + f"self_attn.{n}.weight", (32,), 0.2)
        for n, rows, cols in (("q", 128, hidden), ("k", 64, hidden), ("v", 64, hidden), ("o", hidden, 128),
                              ("index_q", 64, hidden), ("index_k", 32, hidden)):
            if not n.startswith("index") or index:
                linear(p + f"self_attn.{n}_proj.weight", (rows, cols), cols ** -0.5)
        if i == 0:
            for n, rows, cols in (("gate", dense, hidden), ("up", dense, hidden), ("down", hidden, dense)):
                linear(p + f"mlp.{n}_proj.weight", (rows, cols), cols ** -0.5)
            continue
        m = p + "block_sparse_moe."
        w.f32(m + "gate.weight", (4, hidden), 2 * hidden ** -0.5)
        w.f32(m + "e_score_correction_bias", (4,), 0.05)
        for n, rows, cols in (("gate", shared, hidden), ("up", shared, hidden), ("down", hidden, shared)):
            linear(m + f"shared_experts.{n}_proj.weight", (rows, cols), cols ** -0.5)
        for e in range(4):
            for n, rows, cols in (("w1", moe, hidden), ("w3", moe, hidden), ("w2", hidden, moe)):
                linear(m + f"experts.{e}.{n}.weight", (rows, cols), cols ** -0.5)
    os.makedirs(folder, exist_ok=True)
    wrapped = {n: t if isinstance(t, st.Tensor) else st.Tensor("F32", t) for n, t in w.out.items()}
    shards = [{n: t for n, t in wrapped.items() if (".layers.2." in n) == last} for last in (False, True)]
    where, total = {}, 0
    for k, shard in enumerate(shards):
        file = f"model-{k + 1:05d}-of-00002.safetensors"
        st.write(os.path.join(folder, file), shard, {"format": "pt"})
        where.update({n: file for n in shard})
        total += sum(t.data.nbytes for t in shard.values())
    save_json(os.path.join(folder, "model.safetensors.index.json"),
              {"metadata": {"total_size": total}, "weight_map": where})
    save_json(os.path.join(folder, "config.json"),
              root_config(text_config(hidden, 3, dense, moe, shared, [0, 1, 1], [0, 1, 1])))
    save_tokenizer(folder)


if __name__ == "__main__":
    write_tiny(os.path.join(sys.argv[1], "tiny"))
    write_tiny_m3(os.path.join(sys.argv[1], "tiny-m3"))
