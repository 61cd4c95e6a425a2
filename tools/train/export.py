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


# ---- the inverse: what an exported model computes with, as training weights ----

def read(path):
    """Name to (dtype, numpy array) of a safetensors file; BF16 comes as float32, E4M3 as float32 values."""
    b = open(path, "rb").read()
    n = struct.unpack("<Q", b[:8])[0]
    out = {}
    for k, h in json.loads(b[8:8 + n]).items():
        if k == "__metadata__":
            continue
        raw = b[8 + n + h["data_offsets"][0]:8 + n + h["data_offsets"][1]]
        if h["dtype"] == "BF16":
            v = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif h["dtype"] == "F8_E4M3":
            u = np.frombuffer(raw, np.uint8).astype(np.int32)
            m, e = u & 7, (u >> 3) & 15
            v = np.where(e > 0, np.ldexp(8.0 + m, e - 10), m / 512.0) * np.where(u > 127, -1, 1)
            v = v.astype(np.float32)
        else:
            v = np.frombuffer(raw, {"F32": np.float32, "U8": np.uint8}[h["dtype"]])
        out[k] = (h["dtype"], v.reshape(h["shape"]))
    return out


def unmx(t, name):
    v, s = t[name + ".weight"][1], t[name + ".weight_scale_inv"][1]
    e = s.astype(np.int32) - 127
    return torch.from_numpy(np.ldexp(v.reshape(*s.shape, 32), e[..., None]).reshape(v.shape).astype(np.float32))


def unfp4(t, name):
    packed, scale, total = (t[f"{name}.weight_{k}"][1] for k in ("packed", "scale", "global_scale"))
    values = np.array(sorted(CODE, key=CODE.get), np.float32)
    values = np.concatenate([values, -values])
    code = values[np.stack([packed & 15, packed >> 4], -1)].reshape(scale.shape[0], -1, 16)
    return torch.from_numpy((code * scale[..., None] / total).reshape(scale.shape[0], -1).astype(np.float32))


def load_target(c, folder):
    t = read(os.path.join(folder, "model.safetensors"))
    P = "language_model.model."
    plain = lambda k: torch.from_numpy(np.array(t[k][1]))
    every = lambda f, layers: torch.stack([f(f"{P}layers.{i}.") for i in layers])
    L, D, M = range(c.layers), range(c.dense_layers), range(c.dense_layers, c.layers)
    p = {"head": plain("language_model.lm_head.weight"), "embed": plain(P + "embed_tokens.weight"), "norm_out": plain(P + "norm.weight"),
         "norm_in": every(lambda l: plain(l + "input_layernorm.weight"), L),
         "norm_post": every(lambda l: plain(l + "post_attention_layernorm.weight"), L),
         "router": every(lambda l: plain(l + "block_sparse_moe.gate.weight"), M),
         "bias": every(lambda l: plain(l + "block_sparse_moe.e_score_correction_bias"), M)}
    for n, k in (("q_norm", "q_norm"), ("k_norm", "k_norm"), ("index_q_norm", "iq_norm"), ("index_k_norm", "ik_norm")):
        p[k] = every(lambda l: plain(f"{l}self_attn.{n}.weight"), L)
    for n, k in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "o"), ("index_q_proj", "iq"), ("index_k_proj", "ik")):
        p[k] = every(lambda l: unmx(t, f"{l}self_attn.{n}"), L)
    for n in ("gate", "up", "down"):
        p["dense_" + n] = every(lambda l: unmx(t, f"{l}mlp.{n}_proj"), D)
        p["shared_" + n] = every(lambda l: unmx(t, f"{l}block_sparse_moe.shared_experts.{n}_proj"), M)
    for n in ("w1", "w2", "w3"):
        p[n] = every(lambda l: torch.stack([unfp4(t, f"{l}block_sparse_moe.experts.{e}.{n}") for e in range(c.experts)]), M)
    return p


def load_drafter(c, folder):
    t = read(os.path.join(folder, "model.safetensors"))
    P = "language_model.model.dspark."
    plain = lambda k: torch.from_numpy(np.array(t[P + k][1]))
    every = lambda f: torch.stack([f(f"layers.{i}.decoder_layer.") for i in range(c.draft_layers)])
    p = {"fc": plain("fc.weight"), "hidden_norm": plain("hidden_norm.weight"), "final_norm": plain("final_norm.weight"),
         "w1": plain("markov_head.markov_w1.weight"), "w2": plain("markov_head.markov_w2.weight"),
         "conf": plain("confidence_head.proj.weight"), "conf_bias": plain("confidence_head.proj.bias"),
         "norm_in": every(lambda l: plain(l + "input_layernorm.weight")), "norm_post": every(lambda l: plain(l + "post_attention_layernorm.weight")),
         "q_norm": every(lambda l: plain(l + "self_attn.q_norm.weight")), "k_norm": every(lambda l: plain(l + "self_attn.k_norm.weight"))}
    for n in ("q", "k", "v", "o"):
        p[n] = every(lambda l: unmx(t, f"{P}{l}self_attn.{n}_proj"))
    for n in ("gate", "up", "down"):
        p[n] = every(lambda l: unmx(t, f"{P}{l}mlp.{n}_proj"))
    return p


def round_trip(c, folder, scratch):
    """Loads an exported model, exports it again and compares: every weight must be the same number. The bytes of a
    block may differ, since a block whose largest value was rounded down can take the next smaller scale."""
    weights = load_target(c, folder)
    target(c, weights, scratch)
    again = load_target(c, scratch)
    dw = load_drafter(c, folder + "/dspark")
    drafter(c, dw, scratch + "/dspark")
    dagain = load_drafter(c, scratch + "/dspark")
    for a, b in ((weights, again), (dw, dagain)):
        for k in a:
            assert torch.equal(a[k], b[k]), k
    old, new = read(folder + "/model.safetensors"), read(scratch + "/model.safetensors")
    assert list(old) == list(new)
    return sum(not np.array_equal(old[k][1], new[k][1]) for k in old), len(old)


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
