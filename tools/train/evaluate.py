"""Teacher-forced checks. If the arg-max at every gold position is the gold token, greedy decoding gives the gold."""
import numpy as np
import torch

import data
import draft
import model


def run(c, T, params, jobs, B, device, mx, log):
    out = {}
    for name, count, rows in jobs:
        bad, seen = set(), set()
        pad = [data.make_row([], T.S)] * (-len(rows) % B)
        hits = gold = 0
        for i in range(0, len(rows), B):
            part = (rows + pad)[i:i + B]
            tok, cls, start = data.to_device(part, device)
            turn = torch.from_numpy(np.stack([r[3] for r in part])).to(device)
            # the compiled pieces of training are used again, hence no torch.no_grad
            x, _, _, _, head = T.forward(params, tok, start, True, mx)
            target = torch.cat([tok[:, 1:], tok[:, :1]], 1)
            _, _, hit = T.loss_head(c, x, params["norm_out"], head, target, torch.zeros_like(target, dtype=torch.float32))
            hit = hit.view(turn.shape)
            use = turn >= 0
            seen |= set(turn[use].unique().tolist())
            bad |= set(turn[use & ~hit].unique().tolist())
            hits += int(hit[use].sum())
            gold += int(use.sum())
        out[name] = round(1 - len(bad) / max(1, len(seen)), 4)
        log(f"exact {name}: {out[name]:.3f} of {len(seen)}, tokens {hits / max(1, gold):.4f}")
    return out


@torch.no_grad()
def accepted(a, c, T, params, dp, jobs, device, log):
    """Accepted length of greedy drafting along the gold text: accepted tokens + 1 over the rounds of whole turns."""
    out = {}
    fn = torch.compile(draft.draft_forward, dynamic=False) if a.compile else draft.draft_forward
    for name, count, rows in jobs:
        if name not in ("one", "two", "answer", "none", "session"):
            continue
        rows = rows[:a.rows * 2]
        rows = rows + [data.make_row([], T.S)] * (-len(rows) % a.rows)
        tokens = rounds = 0
        for i in range(0, len(rows), a.rows):
            part = rows[i:i + a.rows]
            tok, cls, start = data.to_device(part, device)
            turn = np.stack([r[3] for r in part])
            with torch.enable_grad():
                x, _, _, kept, head = T.forward(params, tok, start, True, True, None, c.draft_targets)
            x, head, kept = x.detach(), head.detach(), [k.detach() for k in kept]
            best = torch.nn.functional.linear(model.rms(x, params["norm_out"], c.eps), head).argmax(-1)
            match = np.zeros(turn.shape, np.int64)
            # an anchor is a gold token; position p predicts p + 1, so gold token p has turn[p - 1] >= 0
            where = [np.nonzero(turn[r] >= 0)[0] + 1 for r in range(len(part))]
            most = max(1, max(len(w) for w in where))
            for at in range(0, most, a.anchors):
                an = np.zeros((len(part), a.anchors), np.int64)
                for r, w in enumerate(where):
                    s = w[at:at + a.anchors]
                    an[r, :len(s)] = np.minimum(s, T.S - 9)
                anc = torch.from_numpy(an).to(device)
                _, logits, _ = fn(c, dp, kept, params["embed"].to(model.BF), head, tok, start, anc, T.cos, T.sin)
                pos = anc[..., None] + torch.arange(c.draft_block, device=device)
                want = best.gather(1, pos.reshape(len(part), -1)).view(pos.shape)
                m = (logits.argmax(-1).view(pos.shape) == want).long().cumprod(-1).sum(-1).cpu().numpy()
                for r, w in enumerate(where):
                    s = w[at:at + a.anchors]
                    match[r, np.minimum(s, T.S - 9)] = m[r, :len(s)]
            for r in range(len(part)):
                runs, p = turn[r], 0
                while p < T.S:
                    if runs[p] < 0:
                        p += 1
                        continue
                    e = p
                    while e < T.S and runs[e] == runs[p]:
                        e += 1
                    q = p + 1                    # the first gold token comes from prefill
                    while q < e:                 # gold tokens are p + 1 .. e
                        n = min(int(match[r, min(q, T.S - 9)]) + 1, e - q)
                        tokens += n
                        rounds += 1
                        q += n
                    p = e
        out[name] = round(tokens / max(1, rounds), 3)
        log(f"accepted length {name}: {out[name]:.2f} over {rounds} rounds")
    return out
