"""Prompts of the bundled model: conversations made of the hand-written requests in tests/eval and a public text, rendered
and encoded by chat.py, cut to exact lengths."""
import json
import os

from chat import Tokenizer, render
from vectors import whole_model

COUNTS = (1, 127, 128, 129, 511, 512, 513, 2049, 8000)
QUESTIONS = ["Weather in Oslo and Bergen?", "Remind me at 18:45 to water the plants.", "Read notes/plan.txt for me.",
             "Mail ann@fjord.no that the boat is ready.", "Start a timer of 12 minutes.", "How much is 250 USD in JPY?"]


def conversation(root):
    """Messages and tools of a long session: each request with its gold calls, results and an answer; one result is a
    long text."""
    with open(os.path.join(root, "tests", "eval", "tools.json"), encoding="utf-8") as f:
        tools = json.load(f)[:8]
    with open(os.path.join(root, "tests", "eval", "requests.jsonl"), encoding="utf-8") as f:
        rows = [json.loads(line) for line in f]
    with open(os.path.join(root, "LICENSE"), encoding="utf-8") as f:
        licence = f.read()
    messages = [{"role": "system", "content": "You are a careful assistant for one household."}]
    for n, r in enumerate(rows):
        if "calls" not in r["expect"]:
            continue
        messages.append(r["messages"][-1])
        messages.append({"role": "assistant", "content": None, "tool_calls": [
            {"function": {"name": c["name"], "arguments": c["arguments"]}} for c in r["expect"]["calls"]]})
        for c in r["expect"]["calls"]:
            long = c["name"] == "open_file"
            messages.append({"role": "tool", "content": licence[:4000] if long else json.dumps({"status": "ok", "id": n})})
        messages.append({"role": "assistant", "content": "Done."})
    return messages, tools


def prompts(folder, root):
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as f:
        identity = json.load(f)["whimbrel"]["identity"]
    t = Tokenizer(os.path.join(folder, "tokenizer.json"))
    messages, tools = conversation(root)
    whole = t.encode_pieces(render(messages, tools, identity, "disabled", generation_prompt=False))
    assert len(whole) > max(COUNTS)
    out = {}
    for k, count in enumerate(COUNTS):
        head = t.encode_pieces(render([], [], identity, "disabled", generation_prompt=False))
        tail = t.encode_pieces(render([{"role": "user", "content": QUESTIONS[k % len(QUESTIONS)]}], None, identity,
                                      "disabled"))[len(head):]
        end = [t.specials["[e~["]] + t.encode("\n")     # closes whatever turn the cut fell into
        tail = end + tail
        out[str(count)] = [whole[:count] if count <= len(tail) else whole[:count - len(tail)] + tail]
        assert len(out[str(count)][0]) == count
    return out


def nano(folder, model):
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
    whole_model(os.path.join(folder, "nano-nvfp4.safetensors"), model, os.path.join(model, "dspark"), "nvfp4",
                prompts(model, root), full_logits=lambda name: name == "129", pick=False,
                more={"2049": ([], [6]), "8000": ([6], [])})
