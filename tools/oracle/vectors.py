"""Writes the golden vectors. Names, shapes and meanings: tests/vectors/README.md.

    python3 tools/oracle/vectors.py formats tests/vectors
    python3 tools/oracle/vectors.py ops     tests/vectors
    python3 tools/oracle/vectors.py tiny    tests/vectors
    python3 tools/oracle/vectors.py nano    tests/vectors config/models/nano"""
import os
import sys
import time

import numpy as np
import torch

import formats as fmt
import tensors as st
from model import Cache, Draft, Maths, Model, load_config, to_bf16, to_e4m3

GREEDY = 48


# ---- formats ----

def kv_rows(x):
    """NVFP4 rows as a cache plane holds them: code bytes, then scale bytes."""
    packed, scales = fmt.nvfp4_insert(to_bf16(x).numpy())
    return np.concatenate([packed, scales], -1)


def formats(folder):
    rng = np.random.default_rng(101)
    out = {}
    # E4M3: every value, every midpoint and its neighbours, saturation, subnormals, specials.
    edge = np.sort(fmt.E4M3[:0x7F].astype(np.float64))
    mid = ((edge[1:] + edge[:-1]) / 2).astype(np.float32)
    x = np.concatenate([edge.astype(np.float32), mid, np.nextafter(mid, np.float32(1e9)),
                        np.nextafter(mid, np.float32(0)), np.float32([448, 464, 465, 480, 1e6, np.inf, 1e-40, 0]),
                        rng.standard_normal(200).astype(np.float32) * np.float32(20)])
    x = np.concatenate([x, -x, np.float32([np.nan])])
    out["e4m3.x"], out["e4m3.bytes"], out["e4m3.values"] = x, fmt.e4m3_bytes(x), fmt.E4M3
    out["e8m0.values"] = fmt.E8M0
    out["e2m1.values"] = fmt.E2M1
    # BF16: ties to both sides, carries, overflow to infinity, subnormals.
    bits = np.concatenate([rng.integers(0, 1 << 32, 400), (rng.integers(0, 1 << 16, 200) << 16) + 0x8000,
                           [0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x7F800000, 0xFF800000, 1, 0x8000, 0x18000, 0x80000001,
                            0x3F808000, 0x3F818000, 0x3F80FFFF]]).astype(np.uint32)
    x = bits.view(np.float32)
    x = x[~np.isnan(x)]
    out["bf16.x"], out["bf16.bits"] = x, st.Tensor("BF16", fmt.bf16_bits(x))
    # NVFP4 on insert: the four published groups first, then ties, zeros, tiny and huge groups.
    ladder = np.float32([6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25])
    groups = [np.zeros(16), np.concatenate([ladder, -ladder]), np.tile([3000, -3000], 8), 3.1 * np.sin(0.7 * np.arange(16))]
    for scale in (2.0 ** -9, 2.0 ** -5, 0.40625, 1.125, 13, 448):           # every tie, at scales that are E4M3 values
        groups.append(np.concatenate([ladder, -ladder]) * scale)
    groups += [np.full(16, 1e-6), np.full(16, 2.0 ** -9), np.eye(16)[3] * 1e30, np.float32([-0.0] * 16)]
    groups += [rng.standard_normal(16) * 10.0 ** rng.uniform(-4, 4) for _ in range(240)]
    x = fmt.round_bf16(np.array(groups, np.float32))
    packed, scales = fmt.nvfp4_insert(x)
    out["nvfp4.x"], out["nvfp4.codes"], out["nvfp4.scales"] = x, packed, scales[:, 0]
    out["nvfp4.read"] = fmt.nvfp4_readback(packed, scales)
    out["readback.table"] = fmt.readback_table()
    # Weights.
    w = (rng.standard_normal((8, 64)) * rng.uniform(0.01, 3, (8, 1))).astype(np.float32)
    total = np.float32(2688 / abs(w).max())
    packed, scales = fmt.nvfp4_weight_encode(w, total)
    out["nvfp4w.packed"], out["nvfp4w.scales"] = packed, st.Tensor("F8_E4M3", scales)
    out["nvfp4w.global"], out["nvfp4w.values"] = np.array([total]), fmt.nvfp4_weight(packed, scales, total)
    elements, scales = fmt.mxfp8_encode(w)
    elements[0] = np.arange(64)
    elements[1] = np.where(np.arange(64, 128) == 0x7F, 0x7E, np.arange(64, 128))
    scales[2] = [1, 254]
    out["mxfp8.bytes"], out["mxfp8.scales"] = st.Tensor("F8_E4M3", elements), scales
    with np.errstate(over="ignore"):
        out["mxfp8.values"] = fmt.mxfp8_weight(elements, scales)
    changed = int((fmt.E4M3[fmt.readback_table()[1:0x7F, :8]] != fmt.E4M3[1:0x7F, None] * fmt.E2M1[None, :8]).sum())
    assert changed == 275
    st.write(os.path.join(folder, "formats.safetensors"), out, {"readback_changed": changed, "readback_of": 1008})


# ---- operations ----

class Shaken(Model):
    """A model whose linear layers are off by up to `amount` of their mean size, drawn from `rng`: shows which codes,
    choices and logits hang on the last bits of a sum."""
    rng, amount = None, 4e-6

    def linear(self, x, w):
        y = super().linear(x, w)
        if self.rng is None:
            return y
        noise = torch.from_numpy(self.rng.uniform(-1, 1, tuple(y.shape))).float()
        return y + self.amount * noise * y.abs().mean()


def steady(m, i, x, pos):
    """Whether every code of these rows stays the same under noise far above the rounding of float32 sums."""
    def codes():
        p = m.project(i, x, pos)
        return ([kv_rows(p[n]) for n in ("k", "v", "ik")] +
                [fmt.e4m3_bytes(to_bf16(p[n]).numpy()) for n in ("q", "iq")])
    m.rng = None
    want = codes()
    for seed in range(8):
        m.rng = np.random.default_rng(seed)
        if any((a != b).any() for a, b in zip(want, codes())):
            m.rng = None
            return False
    m.rng = None
    return True


def ops(folder):
    rng = np.random.default_rng(202)
    m = Shaken(os.path.join(folder, "tiny"))
    f32 = Model(os.path.join(folder, "tiny"), kv="f32")
    c, out = m.c, {}
    draw = lambda *shape: torch.from_numpy(rng.standard_normal(shape).astype(np.float32))
    quantised = lambda *shape: to_e4m3(draw(*shape))

    x = draw(6, 128) * torch.tensor([1, 100, 1e-3, 1e8, 0, 1e-12]).view(-1, 1)
    w = draw(128) * 0.1
    out["norm.x"], out["norm.w"], out["norm.y"] = x, w, m.norm(x, w)

    positions = [0, 1, 127, 128, 129, 4095, 8000, 32767]
    x, w = draw(8, 2, 32), draw(32) * 0.2
    out["rope.pos"], out["rope.x"], out["rope.w"] = np.int32(positions), x, w
    out["rope.y"] = m.rope(m.norm(x, w), np.array(positions))
    out["rope.cos"], out["rope.sin"] = m.rope_table(positions)
    far = [0, 1, 127, 128, 4095, 100000, 524287, 1048575]
    big = Maths(load_config(os.path.join(folder, "tiny")), "f64")
    big.c.theta, big.c.rotary = 5e6, 64
    out["rope5m.pos"] = np.int32(far)
    out["rope5m.cos"], out["rope5m.sin"] = big.rope_table(far)

    ids = np.int32([0, 319, 7, 7, 250])
    out["embed.ids"], out["embed.y"] = ids, m.embed[torch.from_numpy(ids).long()]

    x = draw(5, 128)
    out["linear.x"] = x
    for name, w in (("mxfp8", m.w[1]["q"]), ("nvfp4", m.w[1]["experts"][2]["gate"]), ("bf16", m.head)):
        out[f"linear.{name}.y"] = m.linear(x, w)
        out[f"linear.{name}.w"] = w[:8].float()

    g, u = draw(400) * 5, draw(400) * 5
    g[:8] = torch.tensor([7.0, 7.5, -50, 0, 1e4, -1e4, 6.999, -0.0])
    u[:8] = torch.tensor([7.0, -7.0, -7.5, 1e4, 1e4, -1e4, -1, 3])
    out["act.gate"], out["act.up"], out["act.y"] = g, u, m.swiglu(g, u)

    # The rows of attn_in: one sequence, positions ascending.
    pos = torch.tensor([0, 1, 127, 128, 129, 511, 512, 1499])
    for i in (0, 2):
        rows = []
        for at in range(len(pos)):
            x = draw(1, 128) * 1.5
            while not steady(m, i, x, pos[at:at + 1]):
                x = draw(1, 128) * 1.5
            rows.append(x)
        x = torch.cat(rows)
        p = m.project(i, x, pos)
        n = f"attn_in.{i}."
        out[n + "x"], out[n + "pos"] = x, pos.int()
        for name in ("q", "k", "v", "iq", "ik"):
            out[n + "f32." + name] = p[name]
        out[n + "q"], out[n + "iq"] = to_e4m3(p["q"]), to_e4m3(p["iq"])
        out[n + "q_bytes"] = fmt.e4m3_bytes(out[n + "q"].numpy())
        out[n + "iq_bytes"] = fmt.e4m3_bytes(out[n + "iq"].numpy())
        for name in ("k", "v", "ik"):
            rows = kv_rows(p[name])
            out[n + name + "_rows"] = rows.transpose(1, 0, 2) if rows.ndim == 3 else rows

    # Selection, with exact ties: blocks 2 and 5 are equal, and block 3 equals both but for its worst token.
    n = 1100
    ik = draw(n, 32)
    ik[5 * 128:6 * 128] = ik[2 * 128:3 * 128]
    ik[3 * 128:4 * 128] = ik[2 * 128:3 * 128]
    ik[3 * 128 + 17] *= 0.25
    rows = kv_rows(ik)
    seen = torch.from_numpy(fmt.nvfp4_readback(rows[:, :16], rows[:, 16:]))
    pos = torch.tensor([0, 127, 128, 511, 512, 639, 640, 700, 767, 768, 900, 1023, 1024, 1099])
    iq = quantised(len(pos), 2, 32)
    iq[9, 0] = 0                                    # every score is 0: only numbers decide
    scores = m.block_scores(iq, seen, pos)
    chosen, margin = m.select(scores, pos)
    out["select.iq"], out["select.ik_rows"], out["select.pos"] = iq, rows, pos.int()
    out["select.scores"] = scores.transpose(0, 1)
    out["select.blocks"] = block_lists(chosen.transpose(0, 1), c.topk, np.int32, -1)
    out["select.margin"] = margin.t()

    n = 700
    k, v = kv_rows(draw(n, 2, 32)), kv_rows(draw(n, 2, 32))
    read = lambda r: torch.from_numpy(fmt.nvfp4_readback(r[..., :16], r[..., 16:]))
    pos = torch.tensor([0, 5, 128, 511, 512, 640, 699])
    q = quantised(len(pos), 4, 32) * 2
    causal = torch.arange(n)[None, :] <= pos[:, None]
    pick = torch.zeros(2, len(pos), -(-n // 128), dtype=torch.bool)
    for r, at in enumerate(pos.tolist()):
        for h in range(2):
            own = at // 128
            others = rng.permutation(own)[:3]
            pick[h, r, own] = True
            pick[h, r, torch.from_numpy(others).long()] = True
    mask = pick.repeat_interleave(128, -1)[..., :n] & causal[None]
    out["attend.q"], out["attend.pos"] = q, pos.int()
    out["attend.k_rows"], out["attend.v_rows"] = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
    out["attend.blocks"] = block_lists(pick.transpose(0, 1), c.topk, np.int32, -1)
    out["attend.sparse"] = m.attend(q, read(k), read(v), mask)
    out["attend.dense"] = m.attend(q, read(k), read(v), causal)
    n = 140
    k, v, q = draw(n, 2, 32), draw(n, 2, 32), draw(4, 4, 32) * 2
    pos = torch.tensor([0, 127, 128, 139])
    out["attend_f32.q"], out["attend_f32.pos"] = q, pos.int()
    out["attend_f32.k"], out["attend_f32.v"] = k.transpose(0, 1), v.transpose(0, 1)
    out["attend_f32.dense"] = m.attend(q, k, v, torch.arange(n)[None, :] <= pos[:, None])

    x = draw(6, 128)
    out["mlp.0.x"] = x
    out["mlp.0.y"] = m.add(x, m.ffn(0, m.norm(x, m.w[0]["norm_post"]))[0])
    for i in (1, 3):
        x = draw(8, 128) * 2
        n = m.norm(x, m.w[i]["norm_post"])
        routed, shared, (ids, weights, p, margin) = m.ffn(i, n)
        assert margin.min() > 1e-4, margin
        names = {"x": x, "normed": n, "ids": ids.int(), "weights": weights, "probabilities": p, "margin": margin,
                 "routed": routed, "shared": shared, "y": m.add(x, m.add(routed, shared))}
        out.update({f"moe.{i}.{k}": v for k, v in names.items()})
    x = draw(4, 128) * 3
    out["head.x"], out["head.logits"] = x, f32.logits(x)

    # Two draft blocks of 7 rows over one context of 20 positions each.
    rows, size, n = 14, 7, 20
    q, bk, bv, ck, cv = draw(rows, 4, 32), draw(rows, 2, 32), draw(rows, 2, 32), draw(2, n, 2, 32), draw(2, n, 2, 32)
    lo, hi = [0, 4], [0, 20]
    answer = []
    for b in range(2):
        s = slice(b * size, (b + 1) * size)
        keys = torch.cat([ck[b, lo[b]:hi[b]], bk[s]])
        values = torch.cat([cv[b, lo[b]:hi[b]], bv[s]])
        answer.append(m.attend(q[s], keys, values, torch.ones(size, len(keys), dtype=torch.bool)))
    out.update({"draft.q": q, "draft.block_k": bk, "draft.block_v": bv, "draft.ctx_k": ck, "draft.ctx_v": cv,
                "draft.lo": np.int32(lo), "draft.hi": np.int32(hi), "draft.out": torch.cat(answer)})
    save(os.path.join(folder, "ops.safetensors"), out, {"model": "tiny"})


def block_lists(chosen, topk, kind, pad):
    """bool [..., blocks] to ascending numbers [..., topk], padded."""
    flat = chosen.reshape(-1, chosen.shape[-1]).numpy()
    blocks = flat.shape[-1]
    key = np.where(flat, np.arange(blocks), blocks + 1)
    key = np.sort(key, -1)[:, :topk]
    if key.shape[1] < topk:
        key = np.pad(key, ((0, 0), (0, topk - key.shape[1])), constant_values=blocks + 1)
    return np.where(key > blocks, pad, key).astype(kind).reshape(chosen.shape[:-1] + (topk,))


def save(path, out, meta):
    plain = {k: (v.contiguous().numpy() if torch.is_tensor(v) else v) for k, v in out.items()}
    st.write(path, plain, meta)
    print(path, os.path.getsize(path))


# ---- whole models ----

def fixed_rows(count):
    return sorted({0, count // 3, 2 * count // 3, count - 1})


def lanes(trace, layers, rows, kv_heads, topk):
    """The selections of every row: U8 [sparse layers, rows, kv_heads, topk] padded with 255, margins F32."""
    index = {layer: i for i, layer in enumerate(layers)}
    blocks = np.full((len(layers), rows, kv_heads, topk), 255, np.uint8)
    margins = np.full((len(layers), rows, kv_heads), np.inf, np.float32)
    for layer, start, chosen, margin in trace:
        i, end = index[layer], start + chosen.shape[1]
        blocks[i, start:end] = block_lists(chosen.transpose(0, 1), topk, np.uint8, 255)
        margins[i, start:end] = margin.t().numpy()
    return blocks, margins


def run(m, ids):
    """(residual streams after each layer, logits of the fixed rows, selections, margins, cache, greedy ids, gaps)."""
    c, cache, trace = m.c, Cache(m.c), []
    h, hidden = m.forward(ids, cache, want=tuple(range(-1, c.layers)), trace=trace)
    logits = m.logits(h[fixed_rows(len(ids))])
    sparse = [i for i in range(c.layers) if c.sparse[i]]
    blocks, margins = lanes(trace, sparse, len(ids), c.kv_heads, c.topk)
    greedy, gaps = m.generate(cache.copy(), logits[-1], GREEDY)
    return hidden, logits, blocks, margins, cache, greedy, gaps


def draft_vectors(m, draft, ids, greedy, cache, hidden, out, name, full_logits):
    count = len(ids)
    text = list(ids) + greedy
    later = m.forward(greedy, cache.copy(), want=tuple(draft.want))[1]
    features = draft.features({i: torch.cat([hidden[i], later[i]]) for i in draft.want})
    anchors = sorted({max(0, count // 2), count - 1, count}) if count > 1 else [0, 1]
    got = {k: [] for k in ("base", "hidden", "tokens", "gap", "confidence")}
    for p in anchors:
        h, base = draft.block(features, int(text[p]), p)
        tokens, confidence, corrected = draft.chain(h, base, int(text[p]))
        top = torch.topk(corrected, 2)[0]
        got["base"].append(base)
        got["hidden"].append(h)
        got["tokens"].append(tokens)
        got["gap"].append((top[:, 0] - top[:, 1]).tolist())
        got["confidence"].append(confidence)
    n = name + ".draft."
    out[n + "anchors"] = np.int32(anchors)
    out[n + "feature"] = features[[max(0, p - 1) for p in anchors]]
    out[n + "hidden"] = torch.stack(got["hidden"])
    if full_logits:
        out[n + "base"] = torch.stack(got["base"])
    out[n + "tokens"], out[n + "gap"] = np.int32(got["tokens"]), np.float32(got["gap"])
    out[n + "confidence"] = np.float32(got["confidence"])
    # Greedy speculation over the continuation: how many of the 7 are right in each round that lies wholly inside it.
    at, rounds = 0, []
    while at + draft.size < len(greedy):
        p = count + at
        tokens, _, _ = draft.chain(*draft.block(features, int(text[p]), p), int(text[p]))
        right = 0
        while right < draft.size and tokens[right] == text[p + 1 + right]:
            right += 1
        rounds.append(right)
        at += right + 1
    out[n + "rounds"] = np.int32(rounds)


def long_ops(m, count, hidden, out, name, select_layers, attend_layers):
    """Selection and attention of a long prompt from the oracle's own inputs, so that nothing before them matters."""
    at = torch.arange(count)
    for i in sorted(set(select_layers + attend_layers)):
        p = m.project(i, hidden[i - 1], at)
        ik = kv_rows(p["ik"])
        half = m.c.index_dim // 2
        seen = torch.from_numpy(fmt.nvfp4_readback(ik[:, :half], ik[:, half:]))
        pos = torch.from_numpy(np.unique(np.linspace(0, count - 1, 64 if i in select_layers else 16).astype(np.int64)))
        iq = to_e4m3(p["iq"][pos])
        chosen, margin = m.select(m.block_scores(iq, seen, pos), pos)
        lists = block_lists(chosen.transpose(0, 1), m.c.topk, np.int32, -1)
        if i in select_layers:
            n = f"{name}.select.{i}."
            out.update({n + "iq": iq, n + "ik_rows": ik, n + "pos": pos.int(), n + "blocks": lists,
                        n + "margin": margin.t()})
        if i in attend_layers:
            n = f"{name}.attend.{i}."
            half = m.c.head_dim // 2
            k, v, q = kv_rows(p["k"]), kv_rows(p["v"]), to_e4m3(p["q"][pos])
            read = lambda r: torch.from_numpy(fmt.nvfp4_readback(r[..., :half], r[..., half:]))
            mask = chosen.repeat_interleave(m.c.block, -1)[..., :count] & (at[None, :] <= pos[:, None])[None]
            out.update({n + "q": q, n + "k_rows": k.transpose(1, 0, 2), n + "v_rows": v.transpose(1, 0, 2),
                        n + "pos": pos.int(), n + "blocks": lists, n + "sparse": m.attend(q, read(k), read(v), mask)})


def shaken_runs(m, others, ids, base):
    """How far other arithmetic moves the results: logits [fixed rows], selections that change [..], greedy ids kept."""
    _, logits, blocks, _, _, greedy, _ = base
    moved, differ, kept = np.zeros(len(logits), np.float32), np.zeros(blocks.shape[:-1], bool), GREEDY
    for seed, other in enumerate(others):
        other.rng = np.random.default_rng(seed)
        _, o_logits, o_blocks, _, _, o_greedy, _ = run(other, ids)
        moved = np.maximum(moved, (o_logits - logits).abs().max(-1)[0].numpy())
        differ |= (o_blocks != blocks).any(-1)
        kept = min(kept, next((i for i in range(GREEDY) if o_greedy[i] != greedy[i]), GREEDY))
    return moved, differ, kept


def whole_model(path, folder, draft_folder, kv, prompts, full_logits=lambda name: True, pick=True, more=None):
    """Vectors of one model and page type. prompts: name to candidate id lists. With `pick` the first candidate is taken
    whose results do not hang on the last bits of float32 sums; else the first one, as it is. more: prompt to the layers
    for `long_ops`."""
    m = Model(folder, kv)
    others = [Shaken(folder, kv, "f32"), Shaken(folder, kv), Shaken(folder, kv), Shaken(folder, kv)]
    others[0].amount = 0.0
    for other in others[1:]:
        other.amount = 1e-6
    draft = Draft(draft_folder, m) if draft_folder else None
    out, meta = {}, {"model": os.path.basename(folder), "kv": kv, "prompts": " ".join(prompts)}
    for name, candidates in prompts.items():
        began = time.time()
        for tried, ids in enumerate(candidates):
            base = run(m, ids)
            hidden, logits, blocks, margins, cache, greedy, gaps = base
            moved, differ, kept = shaken_runs(m, others, ids, base)
            loose = differ & (margins > 0.01)
            if not pick or (moved.max() < 0.005 and not loose.any() and kept == GREEDY):
                break
        else:
            raise ValueError(f"no steady candidate for {name}")
        rows = fixed_rows(len(ids))
        near = (margins < 0.01).mean()
        margins[differ] = 0
        out.update({f"{name}.{k}": v for k, v in {
            "ids": np.int32(ids), "rows": np.int32(rows), "logits": logits, "moved": moved,
            "hidden": torch.stack([hidden[i][rows] for i in range(-1, m.c.layers)]), "blocks": blocks,
            "margin": margins, "greedy": np.int32(greedy), "gap": np.float32(gaps), "kept": np.int32([kept])}.items()})
        if draft is not None:
            draft_vectors(m, draft, ids, greedy, cache, hidden, out, name, full_logits(name))
        if more and name in more:
            long_ops(m, len(ids), hidden, out, name, *more[name])
        print(f"{os.path.basename(path)} {name}: candidate {tried}, {time.time() - began:.1f} s; noise moves logits by "
              f"{moved.max():.1e}, {differ.sum()} of {differ.size} selections ({loose.sum()} with a margin over 0.01), "
              f"keeps {kept} of {GREEDY} greedy tokens; margins below 0.01: {100 * near:.2f} %", flush=True)
    save(path, out, meta)


def tiny(folder):
    def prompts(seed, counts):
        draw = lambda n: (np.random.default_rng([seed, n, k]).integers(0, 311, n).tolist() for k in range(40))
        return {str(n): draw(n) for n in counts}
    every = (1, 127, 128, 129, 511, 512, 513, 700, 1500)
    model, draft = os.path.join(folder, "tiny"), os.path.join(folder, "tiny", "dspark")
    whole_model(os.path.join(folder, "tiny-nvfp4.safetensors"), model, draft, "nvfp4", prompts(1, every))
    whole_model(os.path.join(folder, "tiny-f32.safetensors"), model, draft, "f32", prompts(2, (1, 129, 700)))
    model = os.path.join(folder, "tiny-m3")
    whole_model(os.path.join(folder, "tiny-m3-f32.safetensors"), model, None, "f32", prompts(3, (1, 128, 513, 700)))
    whole_model(os.path.join(folder, "tiny-m3-nvfp4.safetensors"), model, None, "nvfp4", prompts(4, (129, 700)))


def main():
    torch.set_num_threads(int(os.environ.get("ORACLE_THREADS", "1")))
    what, folder = sys.argv[1], sys.argv[2]
    if what == "formats":
        formats(folder)
    elif what == "ops":
        ops(folder)
    elif what == "tiny":
        tiny(folder)
    elif what == "nano":
        from nano import nano
        nano(folder, sys.argv[3])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
