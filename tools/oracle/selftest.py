"""Checks the oracle: formats against the published byte vectors and counts, the model against itself, tokens against the
reference implementation.

    python3 tools/oracle/selftest.py tests/vectors [config/models/nano]"""
import json
import os
import sys

import numpy as np
import torch

import chat
import formats as f
from model import Cache, Model


def formats():
    x = np.zeros((4, 16), np.float32)
    ladder = [6, 5, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25]
    x[1] = ladder + [-v for v in ladder]
    x[2] = [3000, -3000] * 8
    x[3] = f.round_bf16((3.1 * np.sin(0.7 * np.arange(16))).astype(np.float32))
    x[2] = f.round_bf16(x[2])
    packed, scales = f.nvfp4_insert(x)
    want = ["00" * 8, "67462402efceac0a", "f7" * 8, "6077c4ff0e7647fc"]
    assert [p.tobytes().hex() for p in packed] == want
    assert scales[:, 0].tobytes().hex() == "01387e30"

    table = f.E4M3[f.readback_table()[1:0x7F, :8]]
    assert (table != f.E4M3[1:0x7F, None] * f.E2M1[None, :8]).sum() == 275 and table.size == 1008
    assert (f.readback_table()[0x7F] == 0x7F).all()

    finite = [b for b in range(256) if b & 0x7F != 0x7F]
    assert (f.e4m3_bytes(f.E4M3[finite]) == finite).all()
    mid = (f.E4M3[:0x7E] + f.E4M3[1:0x7F]) / 2            # exact ties go to the even byte
    assert all(b % 2 == 0 for b in f.e4m3_bytes(mid))
    assert (f.e4m3_bytes(np.float32([464, 1e9, np.inf, -np.inf, np.nan])) == [0x7E, 0x7E, 0x7E, 0xFE, 0x7F]).all()
    assert (f.bf16_bits(np.float32([1.00390625, 1.01171875, 3.4e38])) == [0x3F80, 0x3F82, 0x7F80]).all()

    w = np.random.default_rng(1).standard_normal((8, 64)).astype(np.float32)
    assert abs(f.mxfp8_weight(*f.mxfp8_encode(w)) - w).max() <= abs(w).max() / 16
    g = 2688 / abs(w).max()
    assert abs(f.nvfp4_weight(*f.nvfp4_weight_encode(w, g), g) - w).max() < abs(w).max() / 5
    print("formats: ok")



def model(folder):
    ids = np.random.default_rng(3).integers(0, 311, 700)
    for kv in ("nvfp4", "f32"):
        m = Model(os.path.join(folder, "tiny"), kv)
        cache = Cache(m.c)
        whole = m.logits(m.forward(ids, cache)[0])
        parts, at, cut = Cache(m.c), 0, []
        for n in (1, 126, 2, 300, 1, 270):
            cut.append(m.forward(ids[at:at + n], parts, chunk=64)[0])
            at += n
        assert torch.equal(m.logits(torch.cat(cut)), whole)                   # chunks change nothing
        changed = ids.copy()
        changed[650] = (changed[650] + 1) % 311
        again = m.logits(m.forward(changed, Cache(m.c))[0])
        assert torch.equal(again[:650], whole[:650]) and not torch.equal(again[650:], whole[650:])
        m.c.topk = 100
        dense = m.logits(m.forward(ids, Cache(m.c))[0])
        m.c.sparse = [0] * m.c.layers
        assert torch.equal(m.logits(m.forward(ids, Cache(m.c))[0]), dense)    # every block chosen is dense attention
        assert torch.equal(dense[:512], whole[:512]) and not torch.equal(dense[512:], whole[512:])
    print("model: ok")


def tokens(folder, file, cases):
    t = chat.Tokenizer(os.path.join(folder, "tokenizer.json"))
    with open(file, encoding="utf-8") as handle:
        rows = json.load(handle)
    for r in rows["plain"]:
        assert t.encode(r["text"]) == r["ids"], r["text"]
    for r in rows["special"]:
        args = {k: v for k, v in cases[r["case"]].items() if k not in ("name", "text")}
        assert t.encode_pieces(chat.render(**args)) == r["ids"], r["case"]
    print(f"tokens: ok, {len(rows['plain'])} texts and {len(rows['special'])} conversations of {folder}")


def main():
    torch.set_num_threads(1)
    formats()
    if len(sys.argv) > 1:
        folder = sys.argv[1]
        model(folder)
        with open(os.path.join(folder, "chat.json"), encoding="utf-8") as handle:
            cases = {c["name"]: c for c in json.load(handle)["cases"]}
        tokens(os.path.join(folder, "tiny"), os.path.join(folder, "tokens-tiny.json"), cases)
        if len(sys.argv) > 2:
            tokens(sys.argv[2], os.path.join(folder, "tokens-nano.json"), cases)


if __name__ == "__main__":
    main()
