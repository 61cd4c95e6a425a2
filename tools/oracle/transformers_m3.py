"""Logits of tests/vectors/tiny-m3 by an implementation that nobody here wrote: `minimax_m3_vl` of Hugging Face's
transformers (5.17, Apache-2.0, https://github.com/huggingface/transformers). Names, shapes: tests/vectors/README.md.

    python3 tools/oracle/transformers_m3.py tests/vectors

The weights are copied by name into its text model, which then runs in float32, attention "eager", on the prompts of
tiny-m3-f32.safetensors. Printed beside them: how far float64 moves its logits, and how far ours are from them."""
import os
import sys

import numpy as np
import torch
import transformers
from transformers import AutoConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

import tensors as st


def values(tensor):
    if tensor.dtype == "BF16":
        return torch.from_numpy((tensor.data.astype(np.uint32) << 16).view(np.float32))
    return torch.from_numpy(tensor.data.astype(np.float32))


def weight(reader, name):
    """The weight that the library calls `name`."""
    name = "language_model." + name.replace(".mlp.experts.", ".block_sparse_moe.experts.")
    get = lambda n: values(reader[n])
    for mine, theirs in ((".self_attn.indexer.", ".self_attn.index_"), (".mlp.gate.e_score", ".mlp.e_score")):
        name = name.replace(mine, theirs)
    if name.endswith(".experts.gate_up_proj") or name.endswith(".experts.down_proj"):
        stem, part = name.rsplit(".", 1)
        kinds = ("w1", "w3") if part == "gate_up_proj" else ("w2",)
        count = sum(n.startswith(stem + ".") and n.endswith(".w1.weight") for n in reader.where)
        return torch.stack([torch.cat([get(f"{stem}.{e}.{k}.weight") for k in kinds]) for e in range(count)])
    mixture = name.replace(".mlp.", ".block_sparse_moe.")
    if name.endswith(".gate_up_proj.weight"):
        both = [[n.replace("gate_up_proj", p) for p in ("gate_proj", "up_proj")] for n in (name, mixture)]
        return torch.cat([get(n) for n in both[both[0][0] not in reader]])
    return get(name if name in reader else mixture)


def run(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def main():
    folder = sys.argv[1]
    reader = st.Reader(os.path.join(folder, "tiny-m3"))
    config = AutoConfig.from_pretrained(os.path.join(folder, "tiny-m3")).text_config
    config._attn_implementation = config._experts_implementation = "eager"  # its plain formulas
    torch.set_default_dtype(torch.float32)
    model = MiniMaxM3VLForCausalLM(config).float().eval()
    with torch.no_grad():
        for name, place in list(model.named_parameters()) + [(n, b) for n, b in model.named_buffers() if "e_score" in n]:
            found = weight(reader, name)
            assert found.shape == place.shape, (name, found.shape, place.shape)
            place.copy_(found)
    ours, meta = st.read(os.path.join(folder, "tiny-m3-f32.safetensors"))
    out = {}
    for name in meta["prompts"].split():
        ids = ours[name + ".ids"].data.tolist()
        rows = sorted({*range(0, len(ids), 61), len(ids) - 1})
        model.float()
        logits = run(model, ids)
        model.double()
        exact = run(model, ids)
        kept = ours[name + ".rows"].data.tolist()
        print(f"{name}: float64 moves logits by {(logits - exact).abs().max():.1e}; the oracle's differ by "
              f"{(logits[kept] - torch.from_numpy(ours[name + '.logits'].data.copy())).abs().max():.1e} of "
              f"{logits.abs().max():.1f}", flush=True)
        out[name + ".ids"] = np.array(ids, np.int32)
        out[name + ".rows"] = np.array(rows, np.int32)
        out[name + ".logits"] = logits[rows].float().numpy()
    st.write(os.path.join(folder, "tiny-m3-transformers.safetensors"), out,
             {"model": "tiny-m3", "kv": "f32", "prompts": meta["prompts"], "transformers": transformers.__version__})


main()
