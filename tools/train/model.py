"""The target model: MiniMax-M3.1's architecture at toy size, with its number formats in the loop.

Parameters are stacks over layers, so the optimiser and the fake quantisation run once for all layers. Experts are
computed as one wide dense MLP whose gate values are zero for the experts that were not chosen: the same maths as
routing, with no sorting. Attention takes one 64-bit word for each (KV head, query): bit b = block b is attended.
"""
import math

import torch
import torch.nn.functional as F

import quant

try:
    import triton
    import triton.language as tl
    from torch.nn.attention.flex_attention import BlockMask, flex_attention
except ImportError:
    triton = None

BF = torch.bfloat16


def init_params(c, seed=0, device="cpu"):
    g = torch.Generator().manual_seed(seed)

    def n(*shape, std):
        return torch.randn(*shape, generator=g) * std
    h, L, M, D = c.hidden, c.layers, c.moe_layers, c.dense_layers
    s = h ** -0.5
    p = {
        "embed": n(c.vocab, h, std=0.5), "head": n(c.vocab, h, std=0.02),
        "norm_in": torch.zeros(L, h), "norm_post": torch.zeros(L, h), "norm_out": torch.zeros(h),
        "q_norm": torch.zeros(L, c.head_dim), "k_norm": torch.zeros(L, c.head_dim),
        "iq_norm": torch.zeros(L, c.index_dim), "ik_norm": torch.zeros(L, c.index_dim),
        "q": n(L, c.heads * c.head_dim, h, std=s), "k": n(L, c.kv_heads * c.head_dim, h, std=s),
        "v": n(L, c.kv_heads * c.head_dim, h, std=s), "o": torch.zeros(L, h, c.heads * c.head_dim),
        "iq": n(L, c.kv_heads * c.index_dim, h, std=s), "ik": n(L, c.index_dim, h, std=s),
        "dense_gate": n(D, c.dense_inter, h, std=s), "dense_up": n(D, c.dense_inter, h, std=s),
        "dense_down": torch.zeros(D, h, c.dense_inter),
        "shared_gate": n(M, c.shared_inter, h, std=s), "shared_up": n(M, c.shared_inter, h, std=s),
        "shared_down": torch.zeros(M, h, c.shared_inter),
        "w1": n(M, c.experts, c.inter, h, std=s), "w3": n(M, c.experts, c.inter, h, std=s),
        "w2": torch.zeros(M, c.experts, h, c.inter),
        "router": n(M, c.experts, h, std=s), "bias": torch.zeros(M, c.experts),
    }
    return {k: v.to(device) for k, v in p.items()}


MUON = ("q", "k", "v", "o", "dense_gate", "dense_up", "dense_down", "shared_gate", "shared_up", "shared_down", "w1", "w3", "w2")
MX = ("q", "k", "v", "o", "iq", "ik", "dense_gate", "dense_up", "dense_down", "shared_gate", "shared_up", "shared_down")


def rms(x, w, eps):
    f = x.float()
    return (f * torch.rsqrt(f.pow(2).mean(-1, keepdim=True) + eps) * (1 + w)).to(x.dtype)


def swiglu_oai(g, u):
    g, u = g.clamp(max=7.0), u.clamp(-7.0, 7.0)
    return (u + 1) * g * torch.sigmoid(1.702 * g)


def rope(x, cos, sin, rot):
    """x [B, S, heads, dim]; half-split rotation of the first rot dimensions."""
    a, b, rest = x[..., :rot // 2].float(), x[..., rot // 2:rot].float(), x[..., rot:]
    c, s = cos.unsqueeze(2), sin.unsqueeze(2)
    return torch.cat([(a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype), rest], -1)


def rope_table(c, n, device):
    inv = c.theta ** (-torch.arange(0, c.rotary, 2, dtype=torch.float32, device=device) / c.rotary)
    a = torch.arange(n, dtype=torch.float32, device=device)[:, None] * inv
    return a.cos(), a.sin()


def cast_weights(p, mx):
    """What the layers compute with: fake-quantised bf16 copies of the fp32 masters, straight-through."""
    out = {}
    for k in MX:
        w = p[k]
        out[k] = (quant.ste(w, quant.mxfp8_weight(w.detach())[0]) if mx else w).to(BF)
    # w1 and w3 of one expert share a global scale
    w13 = torch.stack([p["w1"], p["w3"]], 2)
    w13 = quant.ste(w13, quant.nvfp4_weight(w13.detach(), (-3, -2, -1))[0]).to(BF)
    out["w1"], out["w3"] = w13.unbind(2)
    out["w2"] = quant.ste(p["w2"], quant.nvfp4_weight(p["w2"].detach(), (-2, -1))[0]).to(BF)
    out["embed"], out["head"] = p["embed"].to(BF), p["head"].to(BF)
    return out


def layer_weights(c, w, p):
    """A list of plain tensors for each layer; unbind keeps the backward pass a single stack."""
    per = {k: w[k].unbind(0) for k in ("q", "k", "v", "o", "iq", "ik")}
    for k in ("norm_in", "norm_post", "q_norm", "k_norm", "iq_norm", "ik_norm"):
        per[k] = p[k].unbind(0)
    dense = {k: w[k].unbind(0) for k in ("dense_gate", "dense_up", "dense_down")}
    M = c.moe_layers
    gate = torch.cat([w["w1"].reshape(M, -1, c.hidden), w["shared_gate"]], 1).unbind(0)
    up = torch.cat([w["w3"].reshape(M, -1, c.hidden), w["shared_up"]], 1).unbind(0)
    down = torch.cat([w["w2"].transpose(2, 3).reshape(M, -1, c.hidden), w["shared_down"].transpose(1, 2)], 1).unbind(0)
    router, bias = p["router"].unbind(0), p["bias"].unbind(0)
    out = []
    for i in range(c.layers):
        d = {k: v[i] for k, v in per.items()}
        if i < c.dense_layers:
            d.update({k: v[i] for k, v in dense.items()})
        else:
            j = i - c.dense_layers
            d.update(gate=gate[j], up=up[j], down=down[j], router=router[j], bias=bias[j])
        out.append(d)
    return out


# ---- the pieces of a layer; each is compiled once and used by all layers ----

def attn_in(c, x, w, cos, sin):
    B, S, _ = x.shape
    a = rms(x, w["norm_in"], c.eps)
    q = F.linear(a, w["q"]).view(B, S, c.heads, c.head_dim)
    k = F.linear(a, w["k"]).view(B, S, c.kv_heads, c.head_dim)
    v = F.linear(a, w["v"]).view(B, S, c.kv_heads, c.head_dim)
    ad = a.detach()                    # the indexer learns from its own loss only
    iq = F.linear(ad, w["iq"]).view(B, S, c.kv_heads, c.index_dim)
    ik = F.linear(ad, w["ik"]).view(B, S, 1, c.index_dim)
    q = quant.q_e4m3(rope(rms(q, w["q_norm"], c.eps), cos, sin, c.rotary))
    k = quant.nvfp4_cache(rope(rms(k, w["k_norm"], c.eps), cos, sin, c.rotary))
    v = quant.nvfp4_cache(v)
    iq = quant.q_e4m3(rope(rms(iq, w["iq_norm"], c.eps), cos, sin, c.rotary))
    ik = quant.nvfp4_cache(rope(rms(ik, w["ik_norm"], c.eps), cos, sin, c.rotary))
    t = lambda y: y.transpose(1, 2).contiguous()
    return t(q), t(k), t(v), t(iq), ik.squeeze(2).contiguous()


def mlp_dense(c, x, att, w):
    x = x + F.linear(att, w["o"])
    a = rms(x, w["norm_post"], c.eps)
    h = swiglu_oai(F.linear(a, w["dense_gate"]), F.linear(a, w["dense_up"]))
    return x + F.linear(h.to(BF) if x.dtype == BF else h, w["dense_down"])


def mlp_moe(c, x, att, w):
    x = x + F.linear(att, w["o"])
    a = rms(x, w["norm_post"], c.eps)
    T = a.reshape(-1, c.hidden)
    p = torch.sigmoid(F.linear(T.float(), w["router"]))
    key = (p + w["bias"]).detach()
    # the chosen ones have fewer than topk strictly better experts; the lower number wins a tie
    better = (key[:, None, :] > key[:, :, None]) | ((key[:, None, :] == key[:, :, None]) & w["tri"])
    chosen = (better.sum(-1) < c.topk_experts)
    sel = p * chosen
    gate = sel / sel.sum(-1, keepdim=True).clamp(min=1e-20) * c.routed_scale
    load = chosen.float().mean(0)
    h = swiglu_oai(F.linear(T, w["gate"]), F.linear(T, w["up"])).view(T.shape[0], -1, c.inter)
    gate = torch.cat([gate, torch.ones_like(gate[:, :1])], 1)
    h = (h * gate.to(h.dtype).unsqueeze(-1)).reshape(T.shape[0], -1)
    return x + (h @ w["down"]).view_as(x), load


def kl_loss(c, q, k, iq, ik, pos, start):
    """KL from the main attention's block mass to the index branch, own block left out. pos [B, P] query positions,
    start [B, S/block] first block of the document of each block."""
    B, _, S, _ = q.shape
    P, NB, R = pos.shape[1], S // c.block, c.heads // c.kv_heads
    with torch.no_grad():
        qs = q.gather(2, pos[:, None, :, None].expand(-1, c.heads, -1, c.head_dim))
        qs = qs.view(B, c.kv_heads, R * P, c.head_dim)
        s = torch.matmul(qs, k.transpose(2, 3)).float() * c.head_dim ** -0.5
        s = s.view(B, c.kv_heads, R, P, S)
        blk = torch.arange(NB, device=q.device)
        own = pos // c.block
        first = start.gather(1, own)
        kv = torch.arange(S, device=q.device)
        ok = (kv[None, None] <= pos[..., None]) & (kv[None, None] >= (first * c.block)[..., None])
        a = torch.softmax(s.masked_fill(~ok[:, None, None], float("-inf")), -1)
        mass = a.view(B, c.kv_heads, R, P, NB, c.block).sum(-1).mean(2)
        other = (blk[None, None] < own[..., None]) & (blk[None, None] >= first[..., None])
        mass = mass * other[:, None]
        use = (other.sum(-1) >= 2)[:, None] & (mass.sum(-1) > 1e-6)
        t = mass / mass.sum(-1, keepdim=True).clamp(min=1e-6)
    iqs = iq.gather(2, pos[:, None, :, None].expand(-1, c.kv_heads, -1, c.index_dim))
    si = torch.matmul(iqs, ik[:, None].transpose(2, 3)).float()
    si = si.view(B, c.kv_heads, P, NB, c.block).amax(-1) * c.index_dim ** -0.5
    lp = torch.log_softmax(si.masked_fill(~other[:, None], -1e30), -1)
    kl = (t * (torch.log(t.clamp(min=1e-9)) - lp)).sum(-1)
    kl = torch.where(use, kl, torch.zeros_like(kl))
    return kl.sum() / use.sum().clamp(min=1)


def loss_head(c, x, norm, head, target, weight):
    """(weighted loss, sum of weights, hits of the arg-max)"""
    y = rms(x, norm, c.eps)
    logits = F.linear(y.reshape(-1, c.hidden), head).float()
    t = target.reshape(-1)
    nll = torch.logsumexp(logits, -1) - logits.gather(1, t[:, None]).squeeze(1)
    hit = logits.argmax(-1) == t
    return (nll * weight.reshape(-1)).sum(), nll.detach(), hit


# ---- block selection ----

if triton is not None:
    @triton.jit
    def _select_kernel(iq, ik, start, bits, H: tl.constexpr, S: tl.constexpr, NB: tl.constexpr, D: tl.constexpr,
                       K: tl.constexpr, BM: tl.constexpr):
        """One program: 64 queries of one head. Runs over the blocks of the document in rising order and keeps the
        best K - 1 block maxima; only a strictly better block replaces one, so ties go to the lower block."""
        m0 = tl.program_id(0) * BM
        bh = tl.program_id(1)
        b = bh // H
        own = m0 // 128
        first = tl.load(start + b * NB + own).to(tl.int32)
        rows = m0 + tl.arange(0, BM)
        d = tl.arange(0, D)
        q = tl.load(iq + (bh * S + rows[:, None]) * D + d[None, :])
        neg = float("-inf")
        s1 = tl.full([BM], neg, tl.float32)
        s2 = tl.full([BM], neg, tl.float32)
        s3 = tl.full([BM], neg, tl.float32)
        i1 = tl.full([BM], 0, tl.int64) + own
        i2 = tl.full([BM], 0, tl.int64) + own
        i3 = tl.full([BM], 0, tl.int64) + own
        for j in range(first, own):
            cols = j * 128 + tl.arange(0, 128)
            kk = tl.load(ik + (b * S + cols[None, :]) * D + d[:, None])
            m = tl.max(tl.dot(q, kk), 1)
            jj = tl.full([BM], 0, tl.int64) + j
            g1, g2, g3 = m > s1, m > s2, m > s3
            s3 = tl.where(g2, s2, tl.where(g3, m, s3))
            i3 = tl.where(g2, i2, tl.where(g3, jj, i3))
            s2 = tl.where(g1, s1, tl.where(g2, m, s2))
            i2 = tl.where(g1, i1, tl.where(g2, jj, i2))
            s1 = tl.where(g1, m, s1)
            i1 = tl.where(g1, jj, i1)
        one = tl.full([BM], 1, tl.int64)
        w = one << (tl.full([BM], 0, tl.int64) + own)
        w |= one << i1
        if K >= 3:
            w |= one << i2
        if K >= 4:
            w |= one << i3
        tl.store(bits + bh * S + rows, w)


def select_torch(c, iq, ik, start):
    """The same selection in plain torch, for checks and for small machines."""
    B, H, S, _ = iq.shape
    NB = S // c.block
    s = torch.matmul(iq.float(), ik.float()[:, None].transpose(2, 3))
    t = torch.arange(S, device=iq.device)
    s = s.masked_fill(t[None, :] > t[:, None], float("-inf")).view(B, H, S, NB, c.block).amax(-1)
    own = (t // c.block)
    blk = torch.arange(NB, device=iq.device)
    first = start[:, own]
    ok = (blk[None, None] >= first[..., None]) & (blk[None, None] < own[None, :, None])
    s = s.masked_fill(~ok[:, None], float("-inf"))
    better = (s[..., None, :] > s[..., :, None]) | ((s[..., None, :] == s[..., :, None]) & (blk[None, :] < blk[:, None]))
    sel = (better.sum(-1) < c.topk_blocks - 1) & ok[:, None] & (s > float("-inf"))
    sel = sel | (blk[None, :] == own[:, None])
    return (sel.long() << blk).sum(-1)


def select(c, iq, ik, start):
    B, H, S, D = iq.shape
    if triton is None or not iq.is_cuda:
        return select_torch(c, iq, ik, start)
    bits = torch.empty(B, H, S, dtype=torch.int64, device=iq.device)
    _select_kernel[(S // 64, B * H)](iq, ik, start, bits, H=H, S=S, NB=S // c.block, D=D, K=c.topk_blocks, BM=64)
    return bits


def dense_bits(c, start, S):
    """All blocks of the own document up to the own block: plain causal attention."""
    blk = torch.arange(S // c.block, device=start.device)
    m = (blk[None, None] >= start[..., None]) & (blk[None, None] <= blk[None, :, None])
    w = (m.long() << blk).sum(-1)
    return w.repeat_interleave(c.block, 1)[:, None].expand(-1, c.kv_heads, -1).contiguous()


def tiles(bits, block):
    """bits [B, H, S] -> (some query of the tile has block b, all queries have it), [B, H, S/block, S/block]."""
    B, H, S = bits.shape
    NB = S // block
    m = ((bits.view(B, H, NB, block, 1) >> torch.arange(NB, device=bits.device)) & 1) != 0
    diag = torch.eye(NB, dtype=torch.bool, device=bits.device)
    return m.any(3), m.all(3) & ~diag


def ordered(m):
    """Counts and indices of the true entries of each row, as flex_attention wants them."""
    return m.sum(-1).to(torch.int32), torch.argsort(m.to(torch.int8), dim=-1, descending=True, stable=True).to(torch.int32)


def mask_parts(bits, block, rep):
    some, full = tiles(bits, block)
    a, b = ordered((some & ~full).repeat_interleave(rep, 1))
    x, y = ordered(full.repeat_interleave(rep, 1))
    return a, b, x, y


class Target:
    """Functions over a parameter dictionary. On a GPU the pieces are compiled and attention is flex_attention."""

    def __init__(self, c, device, S, compiled=True):
        self.c, self.device, self.S = c, device, S
        self.cos, self.sin = rope_table(c, S, device)
        e = torch.arange(c.experts, device=device)
        self.tri = (e[None, :] < e[:, None])[None]
        comp = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self.attn_in, self.mlp_dense, self.mlp_moe = comp(attn_in), comp(mlp_dense), comp(mlp_moe)
        self.kl, self.loss_head, self.cast = comp(kl_loss), comp(loss_head), comp(cast_weights)
        self.mask_parts = comp(mask_parts)
        self.flex = comp(flex_attention) if compiled and triton is not None else None

    def attend(self, q, k, v, bits):
        c = self.c
        B, H, S, D = q.shape
        if self.flex is None:
            kv = torch.arange(S, device=q.device)
            m = (((bits[..., None] >> (kv // c.block)) & 1) != 0) & (kv[None, :] <= kv[:, None])
            R = c.heads // c.kv_heads
            s = torch.matmul(q, k.repeat_interleave(R, 1).transpose(2, 3)).float() * D ** -0.5
            a = torch.softmax(s.masked_fill(~m.repeat_interleave(R, 1), float("-inf")), -1).to(v.dtype)
            o = torch.matmul(a, v.repeat_interleave(R, 1))
        else:
            R = c.heads // c.kv_heads
            n, i, fn, fi = self.mask_parts(bits, c.block, R)

            def mask_mod(b, h, qi, ki):
                return (qi >= ki) & (((bits[b, h // R, qi] >> (ki // c.block)) & 1) != 0)
            bm = BlockMask.from_kv_blocks(n, i, fn, fi, BLOCK_SIZE=c.block, mask_mod=mask_mod, seq_lengths=(S, S))
            o = self.flex(q, k, v, block_mask=bm, enable_gqa=True)
        return o.transpose(1, 2).reshape(B, S, H * D)

    def forward(self, p, tokens, start, sparse, mx, kl_pos=None, keep=()):
        """tokens [B, S], start [B, S/block]. Gives (residual, kl, expert loads, kept residuals)."""
        c = self.c
        w = self.cast(p, mx)
        B, S = tokens.shape
        blk = torch.arange(S // c.block, device=tokens.device)
        rel = ((blk[None] - start) * c.block)[..., None] + torch.arange(c.block, device=tokens.device)
        rel = rel.reshape(B, S)
        cos, sin = self.cos[rel], self.sin[rel]
        x = F.embedding(tokens, w["embed"])
        dense = dense_bits(c, start, S) if not sparse else None
        kl, loads, kept = 0.0, [], []
        for i, lw in enumerate(layer_weights(c, w, p)):
            q, k, v, iq, ik = self.attn_in(c, x, {n: lw[n] for n in ("norm_in", "q", "k", "v", "iq", "ik", "q_norm", "k_norm", "iq_norm", "ik_norm")}, cos, sin)
            if kl_pos is not None:
                kl = kl + self.kl(c, q.detach(), k.detach(), iq, ik, kl_pos, start)
            with torch.no_grad():
                bits = select(c, iq, ik, start) if sparse else dense
            att = self.attend(q, k, v, bits)
            if i < c.dense_layers:
                x = self.mlp_dense(c, x, att, {n: lw[n] for n in ("o", "norm_post", "dense_gate", "dense_up", "dense_down")})
            else:
                x, load = self.mlp_moe(c, x, att, dict({n: lw[n] for n in ("o", "norm_post", "gate", "up", "down", "router", "bias")}, tri=self.tri))
                loads.append(load)
            if i in keep:
                kept.append(x)
        return x, kl, loads, kept, w["head"]
