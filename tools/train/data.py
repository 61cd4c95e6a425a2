"""Worker processes that generate, tokenise and pack conversations into rows; a thread that feeds the device.

A row is S tokens. Documents start at multiples of the attention block, positions restart in each, and a document
never sees another one: exactly what inference does with one sequence.
"""
import multiprocessing as mp
import queue
import threading

import numpy as np

import gen
import tok
from config import PAD

BLOCK = 128
CTX, AI, PROSE, NONE = 0, 1, 2, 3


def encode_doc(enc, segments, limit):
    ids, cls = [], []
    for text, c in segments:
        t = enc.encode(text)
        ids += t
        cls += [c] * len(t)
    return ids[:limit], cls[:limit]


def pack(docs, S, force=False):
    """Best fit of (ids, cls[, turns]) into rows of S. Gives (rows, what is left)."""
    docs.sort(key=lambda d: -len(d[0]))
    rows = []                         # [blocks left, [docs]]
    for d in docs:
        need = -(-len(d[0]) // BLOCK)
        best = None
        for r in rows:
            if r[0] >= need and (best is None or r[0] < best[0]):
                best = r
        if best is None:
            best = [S // BLOCK, []]
            rows.append(best)
        best[0] -= need
        best[1].append(d)
    out, left = [], []
    for r in rows:
        if force or r[0] * BLOCK <= S * 0.06:
            out.append(make_row(r[1], S))
        else:
            left += r[1]
    return out, left


def make_row(docs, S):
    t = np.full(S + 1, PAD, np.int32)
    c = np.full(S + 1, NONE, np.uint8)      # class of the token that position i predicts
    turn = np.full(S + 1, -1, np.int32)
    start = np.zeros(S // BLOCK, np.uint8)
    at = 0
    for d in docs:
        n = len(d[0])
        t[at:at + n] = d[0]
        c[at:at + n - 1] = d[1][1:]
        if len(d) > 2:
            turn[at:at + n - 1] = d[2][1:]
        nb = -(-n // BLOCK)
        start[at // BLOCK:at // BLOCK + nb] = at // BLOCK
        at += nb * BLOCK
    while at < S:                           # the padding is a document of its own
        start[at // BLOCK] = at // BLOCK
        at += BLOCK
    return t[:S], c[:S], start, turn[:S]


def worker(seed, S, data, tokenizer, q):
    g = gen.Generator(seed, "train", data, tokenizer)
    enc = tok.Encoder(tokenizer)
    pool, size = [], 0
    while True:
        while size < 16 * S:
            d = encode_doc(enc, g.document(), S)
            if len(d[0]) > 8:
                pool.append(d)
                size += len(d[0]) + BLOCK // 2
        rows, pool = pack(pool, S)
        size = sum(len(d[0]) + BLOCK // 2 for d in pool)
        if size > 12 * S:                   # too many half-full rows: let one go
            more, pool = pack(pool[:len(pool) // 2], S, True)[0], pool[len(pool) // 2:]
            rows += more
            size = sum(len(d[0]) + BLOCK // 2 for d in pool)
        g.r.shuffle(rows)
        for r in rows:
            q.put((r[0].astype(np.uint16), r[1], r[2]))


def eval_rows(kind, count, seed, S, tokenizer, split="held"):
    """Held-out cases packed with their gold text; turn = case number at the gold tokens."""
    g = gen.Generator(seed, split)
    enc = tok.Encoder(tokenizer)
    docs = []
    for i in range(count):
        _, conv, gold = g.case(kind)
        ids, cls, turn = [], [], []
        for text, c, t in conv.segments():
            e = enc.encode(text)
            ids += e
            cls += [c] * len(e)
            turn += [i if t in gold else -1] * len(e)
        docs.append((ids[:S], cls[:S], turn[:S]))
    return pack(docs, S, True)[0]


def eval_worker(jobs, S, tokenizer, q):
    for name, kind, count, seed, split in jobs:
        q.put((name, count, eval_rows(kind, count, seed, S, tokenizer, split)))


class Feeder:
    def __init__(self, workers, seed, S, data, tokenizer):
        self.q = mp.Queue(maxsize=256)
        self.ps = [mp.Process(target=worker, args=(seed * 1000 + i, S, data, tokenizer, self.q), daemon=True) for i in range(workers)]
        for p in self.ps:
            p.start()
        self.out = queue.Queue(maxsize=4)
        self.tokens = self.starved = 0

    def start(self, B, device):
        import torch

        def run():
            while True:
                if self.q.empty():
                    self.starved += 1
                rows = [self.q.get() for _ in range(B)]
                self.out.put(to_device(rows, device))
        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def next(self):
        return self.out.get()

    def stop(self):
        for p in self.ps:
            p.terminate()


def to_device(rows, device):
    import torch
    t = torch.from_numpy(np.stack([r[0] for r in rows]).astype(np.int32))
    c = torch.from_numpy(np.stack([r[1] for r in rows]))
    s = torch.from_numpy(np.stack([r[2] for r in rows]).astype(np.int64))
    if str(device) != "cpu":
        t, c, s = (x.pin_memory().to(device, non_blocking=True) for x in (t, c, s))
    return t.long(), c, s
