"""Safetensors in M3.1's names, dtypes and packings. Plain torch and numpy; runs anywhere."""
import json
import os
import struct
import sys

import numpy as np
import torch

import config
import quant


def bf16(t):
    return ("BF16", t.detach().cpu().float().bfloat16().view(torch.int16).numpy())


def f32(t):
    return ("F32", t.detach().cpu().float().numpy())


def f8(v):
    """float32 values that lie on the E4M3 grid -> bytes"""
    v = np.ascontiguousarray(v, np.float32)
    a = np.abs(v)
    m, e = np.frexp(np.where(a > 0, a, 1))          # a = m 2^e, m in [.5, 1)
    e = e - 1
    normal = a >= 2.0 ** -6
    bits = np.where(normal, ((e + 7) << 3) | np.rint((m * 2 - 1) * 8).astype(np.int64), np.rint(a * 512).astype(np.int64))
    bits = np.where(a > 0, bits, 0) | np.where(v < 0, 128, 0)
    assert bits.max() < 255
    return ("F8_E4M3", bits.astype(np.uint8))


CODE = {0.0: 0, 0.5: 1, 1.0: 2, 1.5: 3, 2.0: 4, 3.0: 5, 4.0: 6, 6.0: 7}


def fp4(code):
    """E2M1 values -> bytes, the even element in the low nibble; minus zero is zero"""
    a = np.abs(code)
    n = np.zeros(a.shape, np.uint8)
    for k, b in CODE.items():
        n[a == k] = b
    n = n | np.where((code < 0) & (n > 0), 8, 0).astype(np.uint8)
    return n[..., 0::2] | (n[..., 1::2] << 4)


def mx(out, name, w):
    _, e, v = quant.mxfp8_weight(w.detach().cpu().float())
    out[name + ".weight"] = f8(v.numpy())
    out[name + ".weight_scale_inv"] = ("U8", (e.numpy() + 127).astype(np.uint8))


def write(path, tensors):
    names = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
    head, at, blobs = {"__metadata__": {"format": "pt"}}, 0, []
    for k in sorted(tensors):
        t, v = tensors[k]
        b = np.ascontiguousarray(v).tobytes()
        assert len(b) == v.size * names[t]
        head[k] = {"dtype": t, "shape": list(v.shape), "data_offsets": [at, at + len(b)]}
        at += len(b)
        blobs.append(b)
    h = json.dumps(head, separators=(",", ":")).encode()
    h += b" " * (-len(h) % 8)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(h)) + h)
        for b in blobs:
            f.write(b)


def target(c, p, folder):
    p = {k: v.detach().cpu().float() for k, v in p.items()}
    P, out = "language_model.model.", {}
    out["language_model.lm_head.weight"] = bf16(p["head"])
    out[P + "embed_tokens.weight"] = bf16(p["embed"])
    out[P + "norm.weight"] = bf16(p["norm_out"])
    for i in range(c.layers):
        L = f"{P}layers.{i}."
        out[L + "input_layernorm.weight"] = bf16(p["norm_in"][i])
        out[L + "post_attention_layernorm.weight"] = bf16(p["norm_post"][i])
        for n, k in (("q_norm", "q_norm"), ("k_norm", "k_norm"), ("index_q_norm", "iq_norm"), ("index_k_norm", "ik_norm")):
            out[f"{L}self_attn.{n}.weight"] = bf16(p[k][i])
        for n, k in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "o"), ("index_q_proj", "iq"), ("index_k_proj", "ik")):
            mx(out, f"{L}self_attn.{n}", p[k][i])
        if i < c.dense_layers:
            for n in ("gate", "up", "down"):
                mx(out, f"{L}mlp.{n}_proj", p["dense_" + n][i])
            continue
        j, M = i - c.dense_layers, L + "block_sparse_moe."
        out[M + "gate.weight"] = f32(p["router"][j])
        out[M + "e_score_correction_bias"] = f32(p["bias"][j])
        for n in ("gate", "up", "down"):
            mx(out, f"{M}shared_experts.{n}_proj", p["shared_" + n][j])
        # w1 and w3 of an expert share the global scale, as in training
        _, s13, c13, g13 = quant.nvfp4_weight(torch.stack([p["w1"][j], p["w3"][j]], 1), (-3, -2, -1))
        _, s2, c2, g2 = quant.nvfp4_weight(p["w2"][j], (-2, -1))
        for e in range(c.experts):
            for n, s, code, g in (("w1", s13[e, 0], c13[e, 0], g13[e]), ("w3", s13[e, 1], c13[e, 1], g13[e]), ("w2", s2[e], c2[e], g2[e])):
                X = f"{M}experts.{e}.{n}."
                out[X + "weight_packed"] = ("U8", fp4(code.numpy()))
                out[X + "weight_scale"] = f8(s.numpy())
                out[X + "weight_global_scale"] = f32(g.reshape(1))
                out[X + "input_global_scale"] = f32(torch.ones(1))
    write(os.path.join(folder, "model.safetensors"), out)


def drafter(c, p, folder):
    p = {k: v.detach().cpu().float() for k, v in p.items()}
    P, out = "language_model.model.dspark.", {}
    out[P + "fc.weight"] = bf16(p["fc"])
    out[P + "hidden_norm.weight"], out[P + "final_norm.weight"] = bf16(p["hidden_norm"]), bf16(p["final_norm"])
    out[P + "markov_head.markov_w1.weight"], out[P + "markov_head.markov_w2.weight"] = bf16(p["w1"]), bf16(p["w2"])
    out[P + "confidence_head.proj.weight"], out[P + "confidence_head.proj.bias"] = bf16(p["conf"]), bf16(p["conf_bias"])
    for i in range(c.draft_layers):
        L = f"{P}layers.{i}.decoder_layer."
        out[L + "input_layernorm.weight"] = bf16(p["norm_in"][i])
        out[L + "post_attention_layernorm.weight"] = bf16(p["norm_post"][i])
        out[L + "self_attn.q_norm.weight"], out[L + "self_attn.k_norm.weight"] = bf16(p["q_norm"][i]), bf16(p["k_norm"][i])
        for n in ("q", "k", "v", "o"):
            mx(out, f"{L}self_attn.{n}_proj", p[n][i])
        for n in ("gate", "up", "down"):
            mx(out, f"{L}mlp.{n}_proj", p[n][i])
    write(os.path.join(folder, "model.safetensors"), out)


def configs(folder):
    """The small files beside the weights."""
    import tok
    c = config.Config()
    os.makedirs(os.path.join(folder, "dspark"), exist_ok=True)
    for name, obj in (("config.json", config.model_json(c)), ("generation_config.json", config.GENERATION),
                      ("tokenizer_config.json", tok.tokenizer_config()), ("dspark/config.json", config.draft_json(c))):
        with open(os.path.join(folder, name), "w") as f:
            json.dump(obj, f, indent=1)
            f.write("\n")


def join(src, name, dst):
    os.makedirs(os.path.dirname(dst), exist_ok=True)
    with open(dst, "wb") as f:
        i = 0
        while os.path.exists(f"{src}/{name}.safetensors.{i}"):
            f.write(open(f"{src}/{name}.safetensors.{i}", "rb").read())
            i += 1


if __name__ == "__main__":
    # export.py STAGE_B_OUTPUT MODEL_FOLDER EARLY_FOLDER: put the returned pieces in place
    src, dst, early = sys.argv[1:4]
    configs(dst)
    join(src, "model", dst + "/model.safetensors")
    join(src, "draft", dst + "/dspark/model.safetensors")
    join(src, "early", early + "/model.safetensors")
    with open(early + "/config.json", "w") as f:
        json.dump(config.draft_json(config.Config()), f, indent=1)
        f.write("\n")
