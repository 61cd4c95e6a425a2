#!/usr/bin/env python3
"""Training in stages that each fit into ten minutes of one GPU; README.md has the commands.

    train.py --stage a --seconds 560 --data DIR --out DIR          from scratch, constant learning rate
    train.py --stage b --seconds 550 --data DIR --out DIR --ckpt DIR   decay, drafter, export
    train.py --stage c --seconds 550 --data DIR --out DIR --ckpt MODEL  from an exported model on, constant; then b again

--seconds is the budget of the whole process; the schedule follows the clock, and weights are saved before evaluation.
"""
import argparse
import json
import os
import sys
import time

T0 = time.time()
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import multiprocessing as mp

import torch

import data
import draft
import evaluate
import model
import optim
from config import Config

PIECE = 14 << 20


def left(a):
    return a.seconds - (time.time() - T0)


def log(*x):
    print(f"[{time.time() - T0:6.1f}]", *x, flush=True)


def save(params, out, name="ckpt"):
    """bf16 (the routing bias fp32) in pieces of at most 14 MiB."""
    os.makedirs(out, exist_ok=True)
    path = os.path.join(out, name + ".pt")
    torch.save({k: (v.detach().float() if k == "bias" else v.detach().bfloat16()).cpu() for k, v in params.items()}, path)
    b = open(path, "rb").read()
    os.remove(path)
    for i in range(0, len(b), PIECE):
        with open(os.path.join(out, f"{name}.{i // PIECE}"), "wb") as f:
            f.write(b[i:i + PIECE])


def load(folder, device, name="ckpt"):
    import io
    b, i = b"", 0
    while os.path.exists(os.path.join(folder, f"{name}.{i}")):
        b += open(os.path.join(folder, f"{name}.{i}"), "rb").read()
        i += 1
    return {k: v.float().to(device) for k, v in torch.load(io.BytesIO(b), map_location="cpu").items()}


WEIGHT = torch.tensor([0.1, 1.0, 0.5, 0.0])      # loss weight of context, assistant output, prose, padding


def matmul_flops(params):
    """Floating-point operations of the weights' products for one token, forward and backward; all experts are computed.
    Attention's own products are left out."""
    return 6 * sum(p.numel() for k, p in params.items() if p.dim() >= 2 and k not in ("embed", "bias") and not k.startswith(("norm", "q_norm", "k_norm", "iq_norm", "ik_norm")))


PEAK_FLOPS = 989e12       # BF16 of an H100 or H200, dense


def train_target(a, c, params, feeder, T, begin, end, device, decay, warm, dense_until, mx_from):
    """Until the clock says `end`. decay: constant for the share a.hold, then linear to 2 %; else constant."""
    for k, p in params.items():
        p.requires_grad_(k != "bias")
    opt = optim.Optimizer(params, model.MUON, compiled=a.compile)
    wt, flops = WEIGHT.to(device), matmul_flops(params)
    step = seen = 0
    t_first, tokens, last = None, 0, (time.time(), 0)
    win = torch.zeros(4, device=device)
    frac = 0.0
    while True:
        if t_first is None and step == a.warm_steps:
            if device != "cpu":
                torch.cuda.synchronize()
            t_first = time.time() - T0
            log(f"compiled after {step} steps")
        frac = 0.0 if t_first is None else (time.time() - T0 - t_first) / max(1.0, end - t_first)
        if frac >= 1 or (a.steps and step >= a.steps):
            break
        lr = a.peak * min(1.0, (step + 1) / warm)
        if decay:
            lr *= max(0.02, 1 - 0.98 * max(0.0, frac - a.hold) / (1 - a.hold))
        sparse = frac >= dense_until or bool(a.steps and step >= a.steps // 2)
        mx = frac >= mx_from
        tok, cls, start = feeder.next()
        index = step % a.kl_every == 0
        pos = torch.randint(0, T.S, (tok.shape[0], a.kl), device=device) if index else None
        x, kl, loads, _, head = T.forward(params, tok, start, sparse, mx, pos)
        target = torch.cat([tok[:, 1:], tok[:, :1]], 1)
        w = wt[cls.long()]
        total, nll, hit = T.loss_head(c, x, params["norm_out"], head, target, w)
        loss = total / w.sum().clamp(min=1) + kl
        loss.backward()
        opt.step(lr)
        with torch.no_grad():
            rate = 0.0 if decay and frac > 0.85 else 1e-2 if a.stage == "a" and frac < 0.12 else 2e-3
            load_ = torch.stack(loads)
            params["bias"] += rate * torch.sign(c.topk_experts / c.experts - load_)
            ai = (cls.reshape(-1) == 1).float()
            n = ai.sum().clamp(min=1)
            win += torch.stack([(nll * ai).sum() / n, (hit * ai).sum() / n, kl.detach() / c.layers * a.kl_every if index else n * 0, load_.max()])
        step += 1
        tokens += tok.numel()
        if step % 100 == 0 or step in (1, 20, 60):
            m = (win / (step - seen)).tolist()
            seen, rate_ = step, (tokens - last[1]) / (time.time() - last[0])
            last = (time.time(), tokens)
            log(f"step {step} frac {frac:.2f} lr {lr:.3f} loss {m[0]:.4f} acc {m[1]:.4f} kl {m[2]:.4f} maxload {m[3]:.2f} "
                f"{'sparse' if sparse else 'dense'} tok/s {rate_ / 1e3:.0f}k mfu {100 * rate_ * flops / PEAK_FLOPS:.1f}% starved {feeder.starved}")
            win.zero_()
        elif step % 10 == 0:
            win[0].item()                 # keep the host close to the device, the schedule reads the clock
    log(f"target: {step} steps, {tokens / 1e6:.1f} M tokens")
    return step


def train_draft(a, c, params, dp, feeder, T, end, device, watch=lambda step, prefix: False):
    """Until the clock says `end`, or `watch`, which sees every 25th step, says that it is enough."""
    for p in dp.values():
        p.requires_grad_(True)
    opt = optim.Optimizer(dp, draft.MUON, compiled=a.compile)
    fn = torch.compile(draft.draft_loss, dynamic=False) if a.compile else draft.draft_loss
    step, t_first, win = 0, None, torch.zeros(3, device=device)
    while True:
        if step == 4:
            if device != "cpu":
                torch.cuda.synchronize()
            t_first = time.time() - T0
        frac = 0.0 if t_first is None else (time.time() - T0 - t_first) / max(1.0, end - t_first)
        if frac >= 1 or (a.steps and step >= a.steps):
            break
        lr = min(1.0, (step + 1) / 30) * min(1.0, max(0.02, 2 * (1 - frac)))
        tok, cls, start = feeder.next()
        # the compiled pieces of training are used again, hence no torch.no_grad here
        x, _, _, kept, head = T.forward(params, tok, start, True, True, None, c.draft_targets)
        x, head, kept = x.detach(), head.detach(), [k.detach() for k in kept]
        with torch.no_grad():
            embed = params["embed"].to(model.BF)
            anchors = draft.pick_anchors(cls, a.anchors)
        loss, tv, run = fn(c, dp, kept, x, params["norm_out"].detach(), embed, head, tok, cls, start, anchors, T.cos, T.sin)
        loss.backward()
        opt.step(lr)
        win += torch.stack([loss.detach(), tv, run])
        step += 1
        if step % 25 == 0:
            m = (win / 25).tolist()
            win.zero_()
            log(f"draft step {step} loss {m[0]:.4f} tv {m[1]:.4f} prefix {m[2]:.2f} of {c.draft_block}")
            if watch(step, m[2]):
                break
    log(f"draft: {step} steps")


def early_drafter(a, c, params, feeder, T, device, jobs):
    """A drafter from scratch, stopped early: the copy whose accepted length on single calls is nearest to 2.5."""
    dp = draft.init_params(c, a.seed, device)
    copies = []

    def watch(step, prefix):
        if prefix > 1.0:
            copies.append((step, {k: v.detach().clone() for k, v in dp.items()}))
        return prefix > 2.6
    train_draft(a, c, params, dp, feeder, T, time.time() - T0 + a.early_seconds, device, watch)
    one = [j for j in jobs if j[0] == "one"]
    rated = [(evaluate.accepted(a, c, T, params, p, one, device, log)["one"], step, p) for step, p in copies[-5:] or [(0, dp)]]
    best = min(rated, key=lambda r: abs(r[0] - 2.5))
    log(f"early drafter: step {best[1]}, accepted length {best[0]}")
    return best


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--stage", choices=("a", "b", "c", "smoke"), required=True)
    ap.add_argument("--seconds", type=float, required=True)
    ap.add_argument("--data", required=True)
    ap.add_argument("--out", required=True)
    ap.add_argument("--ckpt", help="output of an earlier stage, or an exported model")
    ap.add_argument("--drafter", help="an exported drafter to go on from")
    ap.add_argument("--peak", type=float, default=1.0, help="share of the full learning rate")
    ap.add_argument("--hold", type=float, default=0.35, help="stage b: share of the time before the decay")
    ap.add_argument("--tokenizer", default="config/models/nano/tokenizer.json")
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--rows", type=int, default=8)
    ap.add_argument("--length", type=int, default=8192)
    ap.add_argument("--kl", type=int, default=128)
    ap.add_argument("--kl-every", type=int, default=1, help="steps for one of the indexer")
    ap.add_argument("--anchors", type=int, default=256)
    ap.add_argument("--workers", type=int, default=14)
    ap.add_argument("--warm-steps", type=int, default=8)
    ap.add_argument("--steps", type=int, default=0, help="stop after so many steps (tests)")
    ap.add_argument("--draft-seconds", type=float, default=95)
    ap.add_argument("--early-seconds", type=float, default=25)
    ap.add_argument("--cases", type=int, default=256)
    ap.add_argument("--tiny", action="store_true", help="toy size on the CPU")
    a = ap.parse_args()
    a.compile = not a.tiny
    device = "cpu" if a.tiny else "cuda"
    c = Config(hidden=64, layers=3, dense_layers=1, experts=4, heads=4, dense_inter=64, inter=32, shared_inter=32, draft_targets=(0, 1, 2), draft_inter=64) if a.tiny else Config()
    os.makedirs(a.out, exist_ok=True)
    # processes first: they must not inherit a CUDA context
    stage_seed = {"a": 1, "b": 2, "smoke": 3, "c": 4}[a.stage] + 10 * a.seed
    feeder = data.Feeder(a.workers, stage_seed, a.length, a.data, a.tokenizer)
    eq = mp.Queue()
    jobs = [(k, k, a.cases, 77, "held") for k in ("one", "two", "many", "answer", "none", "session")] + [("seen one", "one", a.cases, 78, "train"), ("seen many", "many", a.cases, 79, "train")]
    ep = mp.Process(target=data.eval_worker, args=(jobs, a.length, a.tokenizer, eq), daemon=True)
    ep.start()
    torch.manual_seed(stage_seed)
    if device != "cpu":
        import torch._dynamo as dynamo
        for k in ("recompile_limit", "cache_size_limit"):
            if hasattr(dynamo.config, k):
                setattr(dynamo.config, k, 64)
    exported = a.ckpt and os.path.exists(os.path.join(a.ckpt, "model.safetensors"))
    if a.stage == "smoke" and exported:
        import export
        log("tensors of other bytes after a round trip of %s: %d of %d" % (a.ckpt, *export.round_trip(c, a.ckpt, "/tmp/round")))
    if exported:
        import export
        params = {k: v.to(device) for k, v in export.load_target(c, a.ckpt).items()}
    else:
        params = load(a.ckpt, device) if a.ckpt else model.init_params(c, a.seed, device)
    T = model.Target(c, device, a.length, a.compile)
    feeder.start(a.rows, device)
    if a.stage == "smoke" and device != "cpu":
        check(c, T, params, feeder, device)
    log("start", a.stage, "parameters", sum(p.numel() for p in params.values()))
    tail = a.draft_seconds + a.early_seconds + 55 if a.stage == "b" else 40 if a.stage == "a" else 30
    if a.stage == "smoke":
        tail = a.seconds * 0.6
    train_target(a, c, params, feeder, T, time.time() - T0, a.seconds - tail, device, decay=a.stage == "b", warm=60,
                 dense_until={"a": 0.2, "b": 0.0, "c": 0.0, "smoke": 0.5}[a.stage], mx_from={"a": 2.0, "b": 0.0, "c": 0.0, "smoke": -1.0}[a.stage])
    save(params, a.out if a.stage != "b" else "/tmp/ckpt")
    if a.stage == "c":                    # smaller than the pieces, should those be lost
        import export
        export.target(c, params, "/tmp/nano")
        split("/tmp/nano/model.safetensors", a.out, "model")
    log("saved")
    jobs_done = [eq.get() for _ in jobs]
    if a.stage == "smoke":
        params = load(a.out, device)
    figures = evaluate.run(c, T, params, jobs_done, a.rows, device, mx=a.stage != "a", log=log)
    json.dump(figures, open(os.path.join(a.out, "figures.json"), "w"))
    if a.stage in ("b", "smoke"):
        import export
        card = {"figures": figures}
        export.target(c, params, "/tmp/nano")
        split(os.path.join("/tmp/nano", "model.safetensors"), a.out, "model")
        length, step, early = early_drafter(a, c, params, feeder, T, device, jobs_done)
        card["early"] = {"step": step, "accepted": length}
        export.drafter(c, early, "/tmp/early")
        split("/tmp/early/model.safetensors", a.out, "early")
        dp = {k: v.to(device) for k, v in export.load_drafter(c, a.drafter).items()} if a.drafter else draft.init_params(c, a.seed, device)
        train_draft(a, c, params, dp, feeder, T, min(a.seconds - 30, time.time() - T0 + a.draft_seconds) if a.stage == "b" else a.seconds - 8, device)
        export.drafter(c, dp, "/tmp/draft")
        split("/tmp/draft/model.safetensors", a.out, "draft")
        log("exported")
        if left(a) > 15:
            card["accepted"] = evaluate.accepted(a, c, T, params, dp, jobs_done, device, log)
        json.dump(card, open(os.path.join(a.out, "figures.json"), "w"))
    log("done")
    feeder.stop()
    os._exit(0)


def split(path, out, name):
    b = open(path, "rb").read()
    for i in range(0, len(b), 15 << 20):
        with open(os.path.join(out, f"{name}.safetensors.{i // (15 << 20)}"), "wb") as f:
            f.write(b[i:i + (15 << 20)])


def check(c, T, params, feeder, device):
    """Compiled pieces against plain torch on one batch: selection, attention, one loss."""
    tok, cls, start = feeder.next()
    with torch.no_grad():
        g = torch.Generator(device).manual_seed(0)
        iq = model.quant.q_e4m3(torch.randn(2, c.kv_heads, T.S, c.index_dim, device=device, generator=g).bfloat16())
        ik = model.quant.nvfp4_cache(torch.randn(2, T.S, c.index_dim, device=device, generator=g).bfloat16())
        st = start[:2].contiguous()
        a, b = model.select(c, iq, ik, st), model.select_torch(c, iq, ik, st)
        log("selection differs on", (a != b).float().mean().item())
        q, k, v = (torch.randn(2, n, T.S, c.head_dim, device=device, generator=g).bfloat16() for n in (c.heads, c.kv_heads, c.kv_heads))
        o = T.attend(q, k, v, a)
        f = T.flex
        T.flex = None
        r = torch.cat([T.attend(q[i:i + 1], k[i:i + 1], v[i:i + 1], a[i:i + 1]) for i in range(2)])
        T.flex = f
        log("attention differs by", (o.float() - r.float()).abs().max().item())


if __name__ == "__main__":
    main()
