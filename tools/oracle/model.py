"""MiniMax-M3 / M3.1-Flash and its DSpark drafter in plain PyTorch on the CPU: the reference that the engine is compared
with. It shares no code with the engine or with the training recipe.

Numerics. Activations and the residual stream are float32. Each operation takes float32 inputs, works in float64 and
rounds its result to float32 once (acc="f64"), so results depend on no order of summation and on no BLAS; acc="f32"
works in float32 instead and shows how far float32 engines may differ. Weights are dequantised to float32; activations
are never quantised. With kv="f32" nothing else is rounded. With kv="nvfp4":
  q, k, v, index q, index k are rounded to BF16 (after norm and RoPE; v has neither), then
  q and index q to E4M3 with scale 1, and k, v, index k to NVFP4 on insert; dot products see NVFP4 read back through a
  second rounding to E4M3. Scores, softmax, P and the output are not rounded further.
The drafter's own keys and values are never rounded.

Written for Debian 12's torch 1.13; little more than mm, exp and elementwise operations is used."""
import json
import math
import os

import numpy as np
import torch

import formats as fmt
from tensors import Reader

PREFIX = "language_model."


class Config:
    def __init__(self, raw):
        text = raw.get("text_config", raw)
        self.hidden = text["hidden_size"]
        self.layers = text["num_hidden_layers"]
        self.heads = text["num_attention_heads"]
        self.kv_heads = text["num_key_value_heads"]
        self.head_dim = text["head_dim"]
        self.vocab = text["vocab_size"]
        self.eps = text.get("rms_norm_eps", 1e-6)
        rope = text.get("rope_parameters") or {}
        self.theta = float(text.get("rope_theta", rope.get("rope_theta", 5e6)))
        part = text.get("partial_rotary_factor", rope.get("partial_rotary_factor", 0.5))
        self.rotary = text.get("rotary_dim") or int(self.head_dim * part)
        self.alpha = text.get("swiglu_alpha", 1.702)
        self.limit = text.get("swiglu_limit", 7.0)
        self.beta = text.get("swiglu_beta", 1.0)
        self.moe = list(text.get("moe_layer_freq") or [0] * self.layers)
        self.experts = text.get("num_local_experts", 0)
        self.experts_per_token = text.get("num_experts_per_tok", 0)
        self.routed_scale = text.get("routed_scaling_factor", 1.0)
        self.shared = text.get("n_shared_experts", 1) > 0
        sparse = text.get("sparse_attention_config") or {}
        used = sparse.get("use_sparse_attention", bool(sparse))
        freq = sparse.get("sparse_attention_freq", [1] * self.layers)
        self.sparse = list(freq) if used else [0] * self.layers
        self.index_heads = sparse.get("sparse_num_index_heads", 0)
        self.index_dim = sparse.get("sparse_index_dim", 0)
        self.topk = sparse.get("sparse_topk_blocks", 0)
        self.block = sparse.get("sparse_block_size", 128)
        self.text = text
        if text.get("use_gemma_norm", True) is not True:
            raise ValueError("only Gemma RMSNorm is known")
        if any(self.sparse):
            if sparse.get("sparse_init_block", 0) != 0 or sparse.get("sparse_local_block", 1) != 1:
                raise ValueError("only sparse_init_block 0 and sparse_local_block 1 are known")
            if self.index_heads != self.kv_heads:
                raise ValueError("one index head serves one kv head")


def load_config(folder):
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
        return Config(json.load(f))


def weight(reader, name):
    """float32 values of the linear weight `name` (no suffix), whatever its format."""
    if name + ".weight_packed" in reader:
        return fmt.nvfp4_weight(reader[name + ".weight_packed"].data,
                                reader[name + ".weight_scale"].data,
                                reader[name + ".weight_global_scale"].data.reshape(-1)[0])
    if name + ".weight_scale_inv" in reader:
        return fmt.mxfp8_weight(reader[name + ".weight"].data, reader[name + ".weight_scale_inv"].data)
    return fmt.value(reader[name + ".weight"])


class Maths:
    """The operations. Float32 tensors in and out; `acc` is the type in which they are computed."""

    def __init__(self, config, acc):
        self.c = config
        self.acc = {"f64": torch.float64, "f32": torch.float32}[acc]

    def up(self, x):
        return x.to(self.acc)

    def linear(self, x, w):
        """x [rows, in] float32, w [out, in] already in acc."""
        return torch.mm(self.up(x), w.t()).float()

    def norm(self, x, w):
        x, w = self.up(x), self.up(w)
        return (x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.c.eps) * (1 + w)).float()

    def rope_table(self, positions):
        """cos, sin [rows, rotary/2] float32. The angle is the float32 product of position and inverse frequency."""
        half = self.c.rotary // 2
        inv = (self.c.theta ** (-2.0 * np.arange(half) / self.c.rotary)).astype(np.float32)
        angle = (np.asarray(positions).astype(np.float32)[:, None] * inv).astype(np.float64)
        return torch.from_numpy(np.cos(angle).astype(np.float32)), torch.from_numpy(np.sin(angle).astype(np.float32))

    def rope(self, x, positions):
        """x [rows, heads, dim]: rotates the pairs (i, i + rotary/2); the rest passes."""
        half = self.c.rotary // 2
        cos, sin = (self.up(t)[:, None, :] for t in self.rope_table(positions))
        a, b = self.up(x[..., :half]), self.up(x[..., half:2 * half])
        return torch.cat([(a * cos - b * sin).float(), (b * cos + a * sin).float(), x[..., 2 * half:]], -1)

    def swiglu(self, g, u):
        g, u = self.up(g), self.up(u)
        g = g.clamp(max=self.c.limit)
        u = u.clamp(-self.c.limit, self.c.limit)
        return ((u + self.c.beta) * g * torch.sigmoid(self.c.alpha * g)).float()

    def mlp(self, x, w):
        return self.linear(self.swiglu(self.linear(x, w["gate"]), self.linear(x, w["up"])), w["down"])

    def attend(self, q, k, v, mask):
        """q [rows, heads, dim]; k, v [n, kv_heads, dim]; mask [kv_heads, rows, n] or [rows, n], True = visible."""
        group = q.shape[1] // k.shape[1]
        scale = 1.0 / math.sqrt(q.shape[-1])
        out = torch.empty_like(q)
        for head in range(q.shape[1]):
            kv = head // group
            visible = mask if mask.dim() == 2 else mask[kv]
            s = torch.mm(self.up(q[:, head]), self.up(k[:, kv]).t()) * scale
            s.masked_fill_(~visible, float("-inf"))
            p = torch.exp(s - s.max(-1, keepdim=True)[0])
            out[:, head] = (torch.mm(p, self.up(v[:, kv])) / p.sum(-1, keepdim=True)).float()
        return out

    def block_scores(self, iq, ik, positions):
        """iq [rows, index_heads, dim], ik [n, dim] to [index_heads, rows, blocks]: the largest visible dot product."""
        n = ik.shape[0]
        blocks = -(-n // self.c.block)
        hidden = torch.arange(n)[None, :] > positions[:, None]
        scores = torch.full((iq.shape[1], iq.shape[0], blocks * self.c.block), float("-inf"))
        for head in range(iq.shape[1]):
            s = torch.mm(self.up(iq[:, head]), self.up(ik).t()).float()
            scores[head, :, :n] = s.masked_fill(hidden, float("-inf"))
        return scores.view(iq.shape[1], iq.shape[0], blocks, self.c.block).max(-1)[0]

    def select(self, scores, positions):
        """scores [heads, rows, blocks] to (chosen [heads, rows, blocks] bool, margin [heads, rows]).

        The own block is forced; the others go by score, equal ones by lower number. The margin is the score of the last
        chosen block (not the own one) less that of the best one left out; +inf where nothing visible is left out."""
        own = positions // self.c.block
        block = torch.arange(scores.shape[-1])
        rank_by = scores.clone()
        rank_by[:, block[None, :] == own[:, None]] = float("inf")
        order = torch.from_numpy(np.argsort(-rank_by.numpy(), axis=-1, kind="stable").copy())
        rank = torch.empty_like(order).scatter_(-1, order, torch.arange(order.shape[-1]).expand_as(order).clone())
        chosen = (rank < self.c.topk) & (block[None, None, :] <= own[None, :, None])
        ranked = torch.gather(rank_by, -1, order)
        if ranked.shape[-1] > self.c.topk:
            last, left = ranked[..., self.c.topk - 1], ranked[..., self.c.topk]
            margin = torch.where(left == float("-inf"), torch.full_like(last, float("inf")), last - left)
        else:
            margin = torch.full(ranked.shape[:-1], float("inf"))
        return chosen, margin

    def route(self, x, w, bias):
        """x [rows, hidden] to (ids ascending [rows, k], weights, probabilities [rows, experts], margin)."""
        p = torch.sigmoid(self.up(self.linear(x, w))).float()
        rank_by = (self.up(p) + self.up(bias)).float()
        order = torch.from_numpy(np.argsort(-rank_by.numpy(), axis=-1, kind="stable").copy())
        k = self.c.experts_per_token
        ids = order[:, :k].sort(-1)[0]
        ranked = torch.gather(rank_by, -1, order)
        margin = ranked[:, k - 1] - ranked[:, k] if k < ranked.shape[1] else torch.full((x.shape[0],), float("inf"))
        chosen = self.up(torch.gather(p, -1, ids))
        return ids, (chosen / chosen.sum(-1, keepdim=True) * self.c.routed_scale).float(), p, margin


def to_bf16(x):
    return torch.from_numpy(fmt.round_bf16(x.numpy()))


def to_e4m3(x):
    return torch.from_numpy(fmt.round_e4m3(to_bf16(x).numpy()))


def through_nvfp4(x):
    return torch.from_numpy(fmt.nvfp4_readback(*fmt.nvfp4_insert(to_bf16(x).numpy())))


class Cache:
    """What attention reads: K, V [n, kv_heads, dim] and index K [n, dim] per layer, as float32 values."""

    def __init__(self, config):
        self.count = 0
        self.k = [torch.empty(0, config.kv_heads, config.head_dim) for _ in range(config.layers)]
        self.v = [torch.empty(0, config.kv_heads, config.head_dim) for _ in range(config.layers)]
        self.ik = [torch.empty(0, config.index_dim) for _ in range(config.layers)]

    def copy(self):
        other = Cache.__new__(Cache)
        other.count, other.k, other.v, other.ik = self.count, list(self.k), list(self.v), list(self.ik)
        return other


class Model(Maths):
    def __init__(self, folder, kv="nvfp4", acc="f64"):
        super().__init__(load_config(folder), acc)
        if kv not in ("nvfp4", "f32"):
            raise ValueError(kv)
        self.kv = kv
        reader = Reader(folder)
        c = self.c
        vector = lambda name: torch.from_numpy(fmt.value(reader[PREFIX + name]).copy())
        matrix = lambda name: self.up(torch.from_numpy(np.ascontiguousarray(weight(reader, PREFIX + name))))
        self.embed = vector("model.embed_tokens.weight")
        self.head = matrix("lm_head")
        self.final_norm = vector("model.norm.weight")
        self.w = []
        for i in range(c.layers):
            p = f"model.layers.{i}."
            w = {"norm_in": vector(p + "input_layernorm.weight"),
                 "norm_post": vector(p + "post_attention_layernorm.weight")}
            for name in ("q_norm", "k_norm") + (("index_q_norm", "index_k_norm") if c.sparse[i] else ()):
                w[name] = vector(p + f"self_attn.{name}.weight")
            for name in ("q", "k", "v", "o") + (("index_q", "index_k") if c.sparse[i] else ()):
                w[name] = matrix(p + f"self_attn.{name}_proj")
            if c.moe[i]:
                m = p + "block_sparse_moe."
                w["gate"] = matrix(m + "gate")
                w["bias"] = vector(m + "e_score_correction_bias")
                w["experts"] = [{"gate": matrix(m + f"experts.{e}.w1"), "up": matrix(m + f"experts.{e}.w3"),
                                 "down": matrix(m + f"experts.{e}.w2")} for e in range(c.experts)]
                if c.shared:
                    w["shared"] = {n: matrix(m + f"shared_experts.{n}_proj") for n in ("gate", "up", "down")}
            else:
                w["mlp"] = {n: matrix(p + f"mlp.{n}_proj") for n in ("gate", "up", "down")}
            self.w.append(w)

    # One layer, in pieces so that the vectors can be taken between them.

    def project(self, i, x, positions):
        """Normed input and q, k, v, index q, index k after norm and RoPE, before any rounding to a cache type."""
        c, w = self.c, self.w[i]
        a = self.norm(x, w["norm_in"])
        heads = lambda name, dim: self.linear(a, w[name]).view(x.shape[0], -1, dim)
        out = {"a": a,
               "q": self.rope(self.norm(heads("q", c.head_dim), w["q_norm"]), positions),
               "k": self.rope(self.norm(heads("k", c.head_dim), w["k_norm"]), positions),
               "v": heads("v", c.head_dim)}
        if c.sparse[i]:
            out["iq"] = self.rope(self.norm(heads("index_q", c.index_dim), w["index_q_norm"]), positions)
            out["ik"] = self.rope(self.norm(heads("index_k", c.index_dim), w["index_k_norm"]), positions)[:, 0]
        return out

    def as_query(self, x):
        return to_e4m3(x) if self.kv == "nvfp4" else x

    def as_cached(self, x):
        return through_nvfp4(x) if self.kv == "nvfp4" else x

    def attention(self, i, q, iq, k, v, ik, positions, trace=None):
        """q, iq as the dot products see them, k, v, ik the whole cache, to [rows, heads * head_dim]."""
        c = self.c
        n = k.shape[0]
        causal = torch.arange(n)[None, :] <= positions[:, None]
        if not c.sparse[i]:
            return self.attend(q, k, v, causal).reshape(q.shape[0], -1)
        scores = self.block_scores(iq, ik, positions)
        chosen, margin = self.select(scores, positions)
        if trace is not None:
            trace.append((i, chosen, margin))
        mask = chosen.repeat_interleave(c.block, -1)[..., :n] & causal[None]
        return self.attend(q, k, v, mask).reshape(q.shape[0], -1)

    def ffn(self, i, x):
        """x is the normed input; returns (routed or dense part, shared part or None, routing or None)."""
        c, w = self.c, self.w[i]
        if not c.moe[i]:
            return self.mlp(x, w["mlp"]), None, None
        ids, weights, p, margin = self.route(x, w["gate"], w["bias"])
        out = torch.zeros(x.shape, dtype=self.acc)
        for e in range(c.experts):
            rows, lane = (ids == e).nonzero(as_tuple=True)
            if len(rows):
                out[rows] += self.up(weights[rows, lane])[:, None] * self.up(self.mlp(x[rows], w["experts"][e]))
        shared = self.mlp(x, w["shared"]) if c.shared else torch.zeros_like(x)
        return out.float(), shared, (ids, weights, p, margin)

    def forward(self, ids, cache, want=(), trace=None, route_trace=None, chunk=256):
        """Runs token ids that follow the cache; returns (final residual stream [rows, hidden], {layer: residual after
        that layer} for the layers in `want`). trace collects selections: (layer, first position, chosen, margin)."""
        c = self.c
        start, rows = cache.count, len(ids)
        positions = torch.arange(start, start + rows)
        h = self.embed[torch.as_tensor(ids, dtype=torch.long)]
        hidden = {-1: h} if -1 in want else {}
        for i in range(c.layers):
            out = torch.empty(rows, c.heads * c.head_dim)
            parts = [self.project(i, h[r:r + chunk], positions[r:r + chunk]) for r in range(0, rows, chunk)]
            cache.k[i] = torch.cat([cache.k[i]] + [self.as_cached(p["k"]) for p in parts])
            cache.v[i] = torch.cat([cache.v[i]] + [self.as_cached(p["v"]) for p in parts])
            if c.sparse[i]:
                cache.ik[i] = torch.cat([cache.ik[i]] + [self.as_cached(p["ik"]) for p in parts])
            for r, p in zip(range(0, rows, chunk), parts):
                rows_at = positions[r:r + chunk]
                end = int(rows_at[-1]) + 1          # later keys are invisible to this chunk
                picked = [] if trace is not None else None
                out[r:r + chunk] = self.attention(
                    i, self.as_query(p["q"]), self.as_query(p["iq"]) if c.sparse[i] else None,
                    cache.k[i][:end], cache.v[i][:end], cache.ik[i][:end] if c.sparse[i] else None, rows_at, picked)
                for layer, chosen, margin in picked or ():
                    trace.append((layer, int(rows_at[0]), chosen, margin))
            for r in range(0, rows, chunk):
                s = slice(r, r + chunk)
                x = self.add(h[s], self.linear(out[s], self.w[i]["o"]))
                routed, shared, routing = self.ffn(i, self.norm(x, self.w[i]["norm_post"]))
                if shared is not None:
                    routed = self.add(routed, shared)
                if routing is not None and route_trace is not None:
                    route_trace.append((i, int(positions[s][0]), routing[0], routing[3]))
                if r == 0:
                    new = torch.empty_like(h)
                new[s] = self.add(x, routed)
            h = new
            if i in want:
                hidden[i] = h
        cache.count += rows
        return h, hidden

    @staticmethod
    def add(a, b):
        return a + b                                # one float32 rounding

    def logits(self, h):
        return self.linear(self.norm(h, self.final_norm), self.head)

    def generate(self, cache, logits, count):
        """Greedy continuation from the logits of the last row: (ids, gap between the two best logits), no stop token."""
        ids, gaps = [], []
        for step in range(count):
            top = torch.topk(logits, 2)[0]
            ids.append(int(torch.argmax(logits)))
            gaps.append(float(top[0] - top[1]))
            if step + 1 < count:
                h, _ = self.forward(ids[-1:], cache)
                logits = self.logits(h)[0]
        return ids, gaps


class Draft(Maths):
    """DSpark: one pass over a block of embeddings, a Markov head along it, a confidence for each position."""

    def __init__(self, folder, target):
        super().__init__(load_config(folder), "f64" if target.acc == torch.float64 else "f32")
        text = self.c.text
        self.target = target
        self.size = text["dspark_block_size"]
        self.noise = text["dspark_noise_token_id"]
        self.want = sorted(text["dspark_target_layer_ids"])
        kinds = text.get("layer_types") or []
        self.window = text.get("sliding_window") if "sliding_attention" in kinds else None
        reader = Reader(folder)
        prefix = PREFIX + "model.dspark."
        vector = lambda name: torch.from_numpy(fmt.value(reader[prefix + name]).copy())
        matrix = lambda name: self.up(torch.from_numpy(np.ascontiguousarray(weight(reader, prefix + name))))
        self.fc = matrix("fc")
        self.hidden_norm, self.final_norm = vector("hidden_norm.weight"), vector("final_norm.weight")
        self.w1, self.w2 = vector("markov_head.markov_w1.weight"), matrix("markov_head.markov_w2")
        self.conf_w, self.conf_b = matrix("confidence_head.proj"), vector("confidence_head.proj.bias")
        self.w = []
        for i in range(self.c.layers):
            p = f"layers.{i}.decoder_layer."
            w = {"norm_in": vector(p + "input_layernorm.weight"),
                 "norm_post": vector(p + "post_attention_layernorm.weight"),
                 "q_norm": vector(p + "self_attn.q_norm.weight"), "k_norm": vector(p + "self_attn.k_norm.weight"),
                 "mlp": {n: matrix(p + f"mlp.{n}_proj") for n in ("gate", "up", "down")}}
            for name in ("q", "k", "v", "o"):
                w[name] = matrix(p + f"self_attn.{name}_proj")
            self.w.append(w)

    def features(self, hidden):
        """{layer: residual after it} to the context features [rows, hidden]."""
        return self.norm(self.linear(torch.cat([hidden[i] for i in self.want], -1), self.fc), self.hidden_norm)

    def block(self, features, anchor_token, position):
        """The context is features[0 .. position-1]; the anchor stands at `position`. Returns the final-normed block
        rows [size, hidden] and the base logits [size, vocab]."""
        c = self.c
        ids = torch.tensor([anchor_token] + [self.noise] * (self.size - 1))
        h = self.target.embed[ids]
        own = torch.arange(position, position + self.size)
        first = 0 if self.window is None else max(0, position - (self.window - 1))
        context = torch.arange(first, position)
        f = features[first:position]
        keys_at = torch.cat([context, own])
        in_block = torch.arange(len(keys_at)) >= len(context)
        seen = torch.ones(self.size, len(keys_at), dtype=torch.bool)
        if self.window is not None:       # the window bounds the left side only; the block sees itself both ways
            seen = (keys_at[None, :] >= own[:, None] - (self.window - 1)) | in_block[None, :]
        for i in range(c.layers):
            w = self.w[i]
            a = self.norm(h, w["norm_in"])
            heads = lambda x, name: self.linear(x, w[name]).view(x.shape[0], w[name].shape[0] // c.head_dim, c.head_dim)
            q = self.rope(self.norm(heads(a, "q"), w["q_norm"]), own)
            k = self.rope(self.norm(torch.cat([heads(f, "k"), heads(a, "k")]), w["k_norm"]), keys_at)
            v = torch.cat([heads(f, "v"), heads(a, "v")])
            h = h + self.linear(self.attend(q, k, v, seen).reshape(self.size, -1), w["o"])
            h = h + self.mlp(self.norm(h, w["norm_post"]), w["mlp"])
        h = self.norm(h, self.final_norm)
        return h, self.linear(h, self.target.head)

    def chain(self, h, base, anchor_token):
        """Greedy along the block: (tokens, confidences before the cut, corrected logits [size, vocab])."""
        tokens, confidence, corrected, last = [], [], [], anchor_token
        for k in range(self.size):
            m = self.w1[last][None]
            logits = (self.up(base[k]) + torch.mm(self.up(m), self.w2.t())[0]).float()
            score = torch.mm(torch.cat([self.up(h[k:k + 1]), self.up(m)], -1), self.conf_w.t())[0, 0]
            confidence.append(float(torch.sigmoid(score + self.up(self.conf_b)[0])))
            last = int(torch.argmax(logits))
            tokens.append(last)
            corrected.append(logits)
        return tokens, confidence, torch.stack(corrected)
