"""Byte-level BPE: training, the Hugging Face file, and a fast encoder for the data workers.

The merges are learned on a strict split (letters, single digits, punctuation, newlines, blanks apart), so no
token joins punctuation with letters or two digits. The file ships M3's o200k-family split: `>Oslo` is then one
span there, but only pieces that occur elsewhere too can come out of it.
"""
import collections
import heapq
import json
import re
import sys

from config import SPECIALS, SPECIAL_ID, VOCAB, IDENTITY, PAD, EOS

O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
         r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
STRICT = r" ?[^\W\d_]+|\d| ?(?:[^\s\w]|_)+|\s*[\r\n]+|\s+"   # standard-library form of the strict split
SPECIAL_RE = re.compile("(" + "|".join(re.escape(s) for s in sorted(SPECIALS, key=len, reverse=True)) + ")")


def byte_chars():
    """GPT-2's printable stand-ins for the 256 bytes."""
    keep = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    table, n = {}, 0
    for b in range(256):
        if b in keep:
            table[b] = chr(b)
        else:
            table[b] = chr(256 + n)
            n += 1
    return table


BYTES = byte_chars()


def to_chars(s):
    return "".join(BYTES[b] for b in s.encode("utf-8"))


def train(texts, size):
    """Ordinary BPE on word counts; pair counts are updated in place, a heap with stale entries picks the best."""
    words = collections.Counter()
    strict = re.compile(STRICT)
    for t in texts:
        for part in SPECIAL_RE.split(t)[::2]:
            words.update(strict.findall(part))
    toks, counts = [], []
    for w, n in words.items():
        if n > 1 or len(w) < 3:
            toks.append(list(to_chars(w)))
            counts.append(n)
    pairs, where = collections.Counter(), collections.defaultdict(set)
    for i, t in enumerate(toks):
        for p in zip(t, t[1:]):
            pairs[p] += counts[i]
            where[p].add(i)
    heap = [(-n, p) for p, n in pairs.items()]
    heapq.heapify(heap)
    merges = []
    while len(merges) < size and heap:
        n, p = heapq.heappop(heap)
        if pairs[p] != -n:                     # stale: push the true count back
            if pairs[p] > 0:
                heapq.heappush(heap, (-pairs[p], p))
            continue
        if -n < 2:
            break
        merges.append(p)
        new = p[0] + p[1]
        touched = set()
        for i in list(where[p]):
            t, c = toks[i], counts[i]
            for q in zip(t, t[1:]):
                pairs[q] -= c
                where[q].discard(i)
            out, j = [], 0
            while j < len(t):
                if j + 1 < len(t) and t[j] == p[0] and t[j + 1] == p[1]:
                    out.append(new)
                    j += 2
                else:
                    out.append(t[j])
                    j += 1
            toks[i] = out
            for q in zip(out, out[1:]):
                pairs[q] += c
                where[q].add(i)
                touched.add(q)
        for q in touched:
            if pairs[q] > 0:
                heapq.heappush(heap, (-pairs[q], q))
    return merges


def tokenizer_json(merges):
    vocab = {}
    for b in range(256):
        vocab[BYTES[b]] = len(vocab)
    for a, b in merges:
        vocab.setdefault(a + b, len(vocab))
    assert len(vocab) <= VOCAB - len(SPECIALS)
    added = [{"id": SPECIAL_ID[s], "content": s, "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for s in SPECIALS]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": O200K}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                      "ignore_merges": False, "vocab": vocab, "merges": [f"{a} {b}" for a, b in merges]}}


def tokenizer_config():
    return {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "]~!b[", "eos_token": "[e~[",
            "pad_token": "]!p~[", "unk_token": None, "add_bos_token": False, "add_eos_token": False,
            "clean_up_tokenization_spaces": False, "model_max_length": 32768,
            "added_tokens_decoder": {str(SPECIAL_ID[s]): {"content": s, "special": True, "normalized": False,
                                                          "lstrip": False, "rstrip": False, "single_word": False}
                                     for s in SPECIALS}}


class Encoder:
    """Reads tokenizer.json. Pieces are cached: most text of a conversation has been seen before."""

    def __init__(self, path):
        import regex
        d = json.load(open(path))
        self.vocab = d["model"]["vocab"]
        self.rank = {tuple(m.split(" ") if isinstance(m, str) else m): i for i, m in enumerate(d["model"]["merges"])}
        self.split = regex.compile(O200K)
        self.cache, self.spans = {}, {}
        self.text = {i: t for t, i in self.vocab.items()}
        self.byte = {c: b for b, c in BYTES.items()}

    def piece(self, p):
        t = list(to_chars(p))
        while len(t) > 1:
            best = min(range(len(t) - 1), key=lambda i: self.rank.get((t[i], t[i + 1]), 1 << 30))
            if (t[best], t[best + 1]) not in self.rank:
                break
            a, b = t[best], t[best + 1]
            out, i = [], 0
            while i < len(t):
                if i + 1 < len(t) and t[i] == a and t[i + 1] == b:
                    out.append(a + b)
                    i += 2
                else:
                    out.append(t[i])
                    i += 1
            t = out
        ids = [self.vocab[x] for x in t]
        if len(self.cache) < 400000:
            self.cache[p] = ids
        return ids

    def encode(self, text):
        """Ids of a text whose specials are meant as specials."""
        out = []
        for part in SPECIAL_RE.split(text):
            if not part:
                continue
            if part in SPECIAL_ID:
                out.append(SPECIAL_ID[part])
                continue
            ids = self.spans.get(part)         # fixed template texts are cached whole
            if ids is None:
                ids = []
                get = self.cache.get
                for p in self.split.findall(part):
                    ids += get(p) or self.piece(p)
                if len(self.spans) < 20000:
                    self.spans[part] = ids
            out += ids
        return out

    def decode(self, ids):
        out = bytearray()
        for i in ids:
            if i in self.text:
                out += bytes(self.byte[c] for c in self.text[i])
            else:
                out += SPECIALS[i - SPECIAL_ID[SPECIALS[0]]].encode()
        return out.decode("utf-8", "replace")


def main():
    import argparse
    import random
    import gen
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default="tokenizer.json")
    ap.add_argument("--docs", type=int, default=2500)
    ap.add_argument("--data", default=None, help="folder with the downloaded texts, see README.md")
    a = ap.parse_args()
    g = gen.Generator(seed=7, split="train", data=a.data)
    texts = []
    for _ in range(a.docs):
        texts.append("".join(t for t, _ in g.document()))
    merges = train(texts, VOCAB - len(SPECIALS) - 256)
    json.dump(tokenizer_json(merges), open(a.out, "w"), ensure_ascii=False)
    n, k = sum(map(len, texts[:200])), 0
    e = Encoder(a.out)
    for t in texts[:200]:
        ids = e.encode(t)
        assert e.decode(ids) == t
        k += len(ids)
    print(f"{len(merges)} merges, {n / k:.2f} characters per token, {k / 200:.0f} tokens per document")


if __name__ == "__main__":
    main()
