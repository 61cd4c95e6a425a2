"""The DSpark drafter: two dense layers over the target's hidden states, seven positions at once, a Markov head."""
import torch
import torch.nn.functional as F

import quant
from config import NS
from model import BF, rms, rope, swiglu_oai

MUON = ("fc", "q", "k", "v", "o", "gate", "up", "down")
MX = ("q", "k", "v", "o", "gate", "up", "down")


def init_params(c, seed=1, device="cpu"):
    g = torch.Generator().manual_seed(seed)

    def n(*shape, std):
        return torch.randn(*shape, generator=g) * std
    h, L, s = c.hidden, c.draft_layers, c.hidden ** -0.5
    p = {"fc": n(h, len(c.draft_targets) * h, std=(3 * h) ** -0.5), "hidden_norm": torch.zeros(h), "final_norm": torch.zeros(h),
         "w1": n(c.vocab, c.draft_rank, std=0.5), "w2": torch.zeros(c.vocab, c.draft_rank),
         "conf": torch.zeros(1, h + c.draft_rank), "conf_bias": torch.zeros(1),
         "norm_in": torch.zeros(L, h), "norm_post": torch.zeros(L, h),
         "q_norm": torch.zeros(L, c.head_dim), "k_norm": torch.zeros(L, c.head_dim),
         "q": n(L, c.heads * c.head_dim, h, std=s), "k": n(L, c.kv_heads * c.head_dim, h, std=s),
         "v": n(L, c.kv_heads * c.head_dim, h, std=s), "o": torch.zeros(L, h, c.heads * c.head_dim),
         "gate": n(L, c.draft_inter, h, std=s), "up": n(L, c.draft_inter, h, std=s), "down": torch.zeros(L, h, c.draft_inter)}
    return {k: v.to(device) for k, v in p.items()}


def draft_forward(c, p, feats, embed, head, tokens, start, anchors, cos_t, sin_t):
    """feats: the kept residuals; anchors [B, A] row positions. Teacher-forced: the Markov and confidence heads see the
    true previous tokens. Gives (final hidden [B, A*7, h], corrected logits, confidence logits)."""
    B, S = tokens.shape
    A, G = anchors.shape[1], c.draft_block
    blk = c.block
    first = start.gather(1, anchors // blk) * blk                         # row position of the document's first token
    j = torch.arange(G, device=tokens.device)
    at = (anchors[..., None] + j)                                         # row positions of the block
    pos = at - first[..., None]
    row = torch.arange(S, device=tokens.device)
    rel = row[None] - (start.repeat_interleave(blk, 1) * blk)
    f = rms(F.linear(torch.cat(feats, -1), p["fc"].to(BF)), p["hidden_norm"], c.eps)
    w = {k: quant.ste(p[k], quant.mxfp8_weight(p[k].detach())[0]).to(BF) for k in MX}
    x = torch.cat([embed[tokens.gather(1, anchors)][:, :, None], embed[NS].expand(B, A, G - 1, -1)], 2).reshape(B, A * G, -1)
    cb, sb = cos_t[pos].reshape(B, A * G, -1), sin_t[pos].reshape(B, A * G, -1)
    cc, sc = cos_t[rel], sin_t[rel]
    qpos = at.reshape(B, A * G, 1)
    see = (row[None, None] >= first.repeat_interleave(G, 1)[..., None]) & (row[None, None] < anchors.repeat_interleave(G, 1)[..., None])
    see = see & (row[None, None] >= qpos - (c.draft_window - 1))
    own = torch.arange(A, device=tokens.device).repeat_interleave(G)
    mask = torch.cat([see, (own[None, :] == own[:, None])[None].expand(B, -1, -1)], 2)[:, None]
    R = c.heads // c.kv_heads
    for i in range(c.draft_layers):
        a = rms(x, p["norm_in"][i], c.eps)
        q = F.linear(a, w["q"][i]).view(B, A * G, c.heads, c.head_dim)
        kb = F.linear(a, w["k"][i]).view(B, A * G, c.kv_heads, c.head_dim)
        vb = F.linear(a, w["v"][i]).view(B, A * G, c.kv_heads, c.head_dim)
        kc = F.linear(f, w["k"][i]).view(B, S, c.kv_heads, c.head_dim)
        vc = F.linear(f, w["v"][i]).view(B, S, c.kv_heads, c.head_dim)
        q = rope(rms(q, p["q_norm"][i], c.eps), cb, sb, c.rotary)
        kb = rope(rms(kb, p["k_norm"][i], c.eps), cb, sb, c.rotary)
        kc = rope(rms(kc, p["k_norm"][i], c.eps), cc, sc, c.rotary)
        k = torch.cat([kc, kb], 1).transpose(1, 2).repeat_interleave(R, 1)
        v = torch.cat([vc, vb], 1).transpose(1, 2).repeat_interleave(R, 1)
        if hasattr(F, "scaled_dot_product_attention"):
            o = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask)
        else:
            s = (q.transpose(1, 2) @ k.transpose(2, 3)).float() * c.head_dim ** -0.5
            o = torch.softmax(s.masked_fill(~mask, float("-inf")), -1).to(v.dtype) @ v
        x = x + F.linear(o.transpose(1, 2).reshape(B, A * G, -1), w["o"][i])
        a = rms(x, p["norm_post"][i], c.eps)
        x = x + F.linear(swiglu_oai(F.linear(a, w["gate"][i]), F.linear(a, w["up"][i])), w["down"][i])
    x = rms(x, p["final_norm"], c.eps)
    prev = tokens.gather(1, at.reshape(B, -1).clamp(max=S - 1))
    m = p["w1"][prev]
    logits = F.linear(x, head).float() + F.linear(m.to(BF), p["w2"].to(BF)).float()
    conf = F.linear(torch.cat([x.float(), m], -1), p["conf"], p["conf_bias"]).squeeze(-1)
    return x, logits, conf


def draft_loss(c, p, feats, last, norm_out, embed, head, tokens, cls, start, anchors, cos_t, sin_t):
    B, S = tokens.shape
    A, G = anchors.shape[1], c.draft_block
    _, logits, conf = draft_forward(c, p, feats, embed, head, tokens, start, anchors, cos_t, sin_t)
    at = (anchors[..., None] + torch.arange(G, device=tokens.device)).reshape(B, -1).clamp(max=S - 1)
    label = tokens.gather(1, (at + 1).clamp(max=S - 1))
    ok = (cls.gather(1, at) == 1).view(B, A, G)
    ok = (ok.long().cumprod(-1)).float()                                   # the contiguous valid prefix
    with torch.no_grad():
        y = last.gather(1, at[..., None].expand(-1, -1, last.shape[-1]))
        pt = torch.softmax(F.linear(rms(y, norm_out, c.eps), head).float(), -1)
    wk = torch.exp(-torch.arange(G, device=tokens.device).float() / 4)
    w = (ok * wk).reshape(B, -1)
    lp = torch.log_softmax(logits, -1)
    ce = -lp.gather(2, label[..., None]).squeeze(-1)
    tv = 0.5 * (lp.exp() - pt).abs().sum(-1)
    bce = F.binary_cross_entropy_with_logits(conf, (1 - tv).detach(), reduction="none")
    n = w.sum().clamp(min=1)
    loss = ((0.1 * ce + 1.8 * tv + bce) * w).sum() / n
    hit = (logits.argmax(-1) == pt.argmax(-1)).view(B, A, G).long() * ok.long()
    run = hit.cumprod(-1).sum(-1).float()
    full = ok[..., -1]
    return loss, ((tv * w).sum() / n).detach(), ((run * full).sum() / full.sum().clamp(min=1)).detach()


def pick_anchors(cls, A):
    """Random positions whose next token is assistant output."""
    r = torch.rand(cls.shape, device=cls.device) + (cls == 1).float() * 2
    r[:, -8:] = -1
    return r.topk(A, 1).indices.sort(1).values
