#!/usr/bin/env python3
"""Seeded generator of whole conversations in the M3.1 template, and of held-out evaluation cases.

Training: Generator(seed, "train", data).document() gives [(text, class)], class 0 context, 1 assistant output, 2 prose.
Evaluation: gen.py --eval KIND --count N --seed S prints JSON lines in OpenAI form; standard library only.

Every choice of the gold answer can be read off the prompt: two tools of a prompt never share a topic, a parameter
that is not mentioned is not given, the order of arguments is the schema's, thoughts and refusals have one wording.
"""
import argparse
import copy
import json
import lzma
import os
import random
import re
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import everyday
import trades
import words as W
from config import IDENTITY
from intents import INTENTS, SNIPS

NSTOK = "]<]minimax[>["
REFUSAL = "Sorry, I can't do that with the tools I have."
THINKING = ("\n\n<thinking_instructions>\nYou have a thinking capability that allows you to reason step by step before "
            "responding. When thinking is enabled, wrap your reasoning in <mm:think></mm:think> tags before your response. "
            "When thinking is disabled, begin your response directly after the </mm:think> prefix. When thinking is "
            "adaptive, decide on your own whether to think for the current turn.\n")
MODES = {"enabled": "Current thinking mode: enabled. You MUST think step by step before every response, including after "
                    "receiving function/tool results.\n",
         "adaptive": "Current thinking mode: adaptive. You are encouraged to think for complex decision-making, "
                     "multi-step reasoning, or when analyzing function/tool results.\n",
         "disabled": "Current thinking mode: disabled. Do not output any thinking process.\n"}
TOOLS_HEAD = ("\n\n# Tools\nYou may call one or more tools to assist with the user query.\n"
              "Here are the tools available in JSONSchema format:\n\n<tools>\n")
TOOLS_TAIL = ("</tools>\n\nTo call tools, wrap all invocations in a single N<tool_call>N</tool_call> block. Parameter "
              "values containing nested objects or arrays are recursively expanded into XML elements. Example:\n\n"
              "N<tool_call>\nN<invoke name=\"tool-name-1\">N<param-1>value-1N</param-1>N<param-2>N<item>N<key-a>val-a"
              "N</key-a>N<key-b>val-bN</key-b>N</item>N</param-2>N</invoke>\nN<invoke name=\"tool-name-2\">N<param-1>"
              "value-1N</param-1>N</invoke>\nN</tool_call>")
TOOLS_TAIL = TOOLS_TAIL.replace("N<", NSTOK + "<")
NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve".split()


# ---- rendering ---------------------------------------------------------------------------------------------------

def render_value(v):
    if isinstance(v, dict):
        return "".join(f"{NSTOK}<{k}>{render_value(x)}{NSTOK}</{k}>" for k, x in v.items() if x is not None)
    if isinstance(v, list):
        return "".join(f"{NSTOK}<item>{render_value(x)}{NSTOK}</item>" for x in v)
    if isinstance(v, bool):
        return "true" if v else "false"
    return str(v)


def render_calls(calls):
    out = NSTOK + "<tool_call>\n"
    for name, args in calls:
        out += f'{NSTOK}<invoke name="{name}">{render_value(args)}{NSTOK}</invoke>\n'
    return out + NSTOK + "</tool_call>"


class Conv:
    """system or None, tools (function objects), thinking mode, effort, turns:
    ("user", text) | ("ai", thought, content, calls, trained) | ("tool", [texts])"""

    def __init__(self):
        self.system, self.tools, self.mode, self.effort, self.turns = None, [], "disabled", None, []

    def head(self):
        s = "]~!b[]~b]system\n" + IDENTITY + THINKING + MODES[self.mode] + "</thinking_instructions>"
        if self.effort:
            s += f"\n\n<effort>{self.effort}</effort>"
        s += "[e~[\n]~b]developer\n" + (self.system if self.system is not None else "You are a helpful assistant.")
        if self.tools:
            s += TOOLS_HEAD + "".join(f"<tool>{json.dumps(t, ensure_ascii=False)}</tool>\n" for t in self.tools)
            s += TOOLS_TAIL
        return s + "[e~[\n"

    def segments(self):
        """[(text, class, turn)] where turn is the index of an assistant turn or -1."""
        out, text = [], self.head()
        for i, t in enumerate(self.turns):
            if t[0] == "user":
                text += f"]~b]user\n{t[1]}[e~[\n"
            elif t[0] == "tool":
                text += "]~b]tool" + "".join(f"\n<response>{r}</response>" for r in t[1]) + "[e~[\n"
            else:
                _, thought, content, calls, trained = t
                text += "]~b]ai\n"
                gold = f"<mm:think>{thought}</mm:think>" if thought else "</mm:think>"
                # what the prompt of that turn already holds is not the model's output
                given = {"enabled": "<mm:think>", "disabled": "</mm:think>", "adaptive": ""}[self.mode]
                if gold.startswith(given):
                    text, gold = text + given, gold[len(given):]
                gold += content + (render_calls(calls) if calls else "") + "[e~["
                if trained:
                    out += [(text, 0, -1), (gold, 1, i)]
                    text = "\n"
                else:
                    text += gold + "\n"
        out.append((text, 0, -1))
        return out


# ---- values ------------------------------------------------------------------------------------------------------

class Values:
    def __init__(self, rng, split, extra, pieces=()):
        self.r, self.split, self.pieces = rng, split, pieces
        keep = (lambda s: W.held(s)) if split == "held" else (lambda s: not W.held(s))
        self.cities = [x for x in W.CITIES if keep(x)]
        self.first = [x for x in W.FIRST if keep(x)]
        self.last = [x for x in W.LAST if keep(x)]
        base = [x for x in W.WORDS if keep(x) and " " not in x]
        self.words = base
        self.extra = [x for x in extra if keep(x)] or base
        self.pools = (self.cities, self.first, self.last, self.words, self.extra)

    def narrow(self, few):
        """Pools as small as the held-out ones, so that one word turns up as verb, parameter and value of one prompt; or all."""
        self.cities, self.first, self.last, self.words, self.extra = self.pools
        if few:
            some = lambda xs, n: self.r.sample(xs, min(n, len(xs)))
            self.cities, self.first, self.last = some(self.cities, 20), some(self.first, 11), some(self.last, 11)
            self.words = self.extra = some(self.words, 10) + some(self.extra, 8) + [self.joined() for _ in range(10)]

    def pick(self, xs):
        return xs[int(self.r.random() * len(xs))]

    def joined(self):
        """A word of one to three entries of the vocabulary, so that every one of them is copied, with a space before it and without."""
        while self.pieces:
            x = "".join(self.pick(self.pieces) for _ in range(self.pick((1, 2, 2, 3))))
            if len(x) < 18 and not W.held(x):
                return x
        return self.pseudo()

    def accent(self, x):
        """Now and then with a letter that is no ASCII: in values only, since names of tools and parameters are ASCII."""
        if self.split == "held" or self.r.random() > 0.08:
            return x
        i = self.r.randrange(len(x))
        if self.r.random() < 0.1:
            return "".join(self.pick(W.SCRIPTS) for _ in range(self.pick((2, 3, 4))))
        return x[:i] + self.pick(W.ACCENTS) + x[i + self.pick((0, 1)):]

    def pseudo(self, n=None):
        if self.pieces and self.r.random() < 0.35:
            return self.joined()
        return "".join(self.pick(W.SYL) for _ in range(n or self.pick((2, 2, 3, 3, 4))))

    def word(self):
        x = self.r.random()
        if self.pieces and x > 0.6:
            return self.joined()
        return self.pick(self.words) if x < 0.4 else self.pick(self.extra) if x < 0.8 else self.pseudo()

    def person(self):
        x = self.r.random()
        a = self.pick(self.first) if x < 0.8 else self.pseudo(2).capitalize()
        if x > 0.4 and x < 0.6:
            return a
        return a + " " + (self.pick(self.last) if self.r.random() < 0.75 else self.pseudo().capitalize())

    def city(self):
        x = self.r.random()
        c = self.pick(self.cities) if x < 0.65 else self.pseudo().capitalize()
        if x > 0.96:
            c = self.pick(("New ", "Port ", "San ", "East ")) + self.pseudo(2).capitalize()
        return c

    def ident(self):
        r, x = self.r, int(self.r.random() * 9)
        L = "".join(self.pick("ABCDEFGHKLMNPRSTUVWXYZ") for _ in range(self.pick((1, 2, 2, 3))))
        n = str(r.randrange(10, 10 ** self.pick((2, 3, 4, 5))))
        if x < 2:
            return f"{L}-{n}"
        if x == 2:
            return L + n
        if x == 3:
            return n
        if x == 4:
            return f"{L.lower()}_{n}"
        if x == 5:
            return f"{L}-{r.randrange(2020, 2028)}-{n}"
        if x == 6:
            return "".join(self.pick("0123456789abcdef") for _ in range(8))
        if x == 7:
            return L + "-" + n + self.pick("ABCX")
        return str(r.randrange(100, 99999))

    def number(self, lo=1, hi=900):
        if self.r.random() < 0.45:
            return self.r.randrange(lo, hi + 1)
        v = round(self.r.uniform(lo, hi), self.pick((1, 1, 2)))
        return int(v) if v == int(v) else v

    def fill(self, t):
        def one(m):
            k = m.group(1)
            return {"w": self.word, "w2": self.word, "p": self.person, "city": self.city,
                    "n": lambda: str(self.r.randrange(2, 99)), "h": lambda: str(self.r.randrange(1, 13)),
                    "c": lambda: f"{self.r.randrange(0, 24)}:{self.r.randrange(0, 12) * 5:02d}",
                    "d": lambda: self.make("dir")[1], "f": lambda: self.make("path")[1],
                    "date": lambda: self.make("date")[1], "email": lambda: self.make("email")[1],
                    "co": lambda: self.pseudo().capitalize(), "t": lambda: self.k_tod()}[k]()
        return re.sub(r"\{(\w+)\}", one, t)

    def phrase(self, lo=1, hi=4):
        return " ".join(self.word() for _ in range(self.r.randrange(lo, hi + 1)))

    def make(self, kind):
        """(as the user says it, the value)"""
        k, _, arg = kind.partition(":")
        v = getattr(self, "k_" + k)(arg) if arg else getattr(self, "k_" + k)()
        return v if isinstance(v, tuple) else (v, v)

    def k_city(self): return self.accent(self.city())
    def k_person(self): return self.accent(self.person())
    def k_word(self): return self.accent(self.word())
    def k_pseudo(self): return self.pseudo()
    def k_id(self): return self.ident()
    def k_sentence(self): return self.fill(self.pick(W.SENTENCES))
    def k_task(self): return self.fill(self.pick(W.TASKS))
    def k_when(self): return self.fill(self.pick(W.WHENS if self.split == "held" or self.r.random() < 0.5 else W.WHENS_EXACT))
    def k_date_raw(self): return self.pick(W.DAYS) if self.r.random() < 0.8 else self.make("date")[1]
    def k_cmd(self): return self.fill(self.pick(W.COMMANDS))
    def k_sql(self): return self.fill(self.pick(W.SQLS))
    def k_currency(self): return self.pick(W.CURRENCIES)
    def k_lang(self): return self.pick(W.LANGS)
    def k_room(self): return self.pick(W.ROOMS) if self.r.random() < 0.8 else self.word()
    def k_device(self): return self.pick(W.DEVICES)
    def k_door(self): return self.pick(W.DOORS)
    def k_coin(self): return self.pick(W.COINS) if self.r.random() < 0.7 else self.pseudo()
    def k_cuisine(self): return self.pick(W.CUISINES)
    def k_dish(self): return self.pick(W.DISHES) if self.r.random() < 0.6 else self.word() + " " + self.word()
    def k_product(self): return self.pick(W.PRODUCTS) if self.r.random() < 0.5 else self.word()
    def k_label(self): return self.pick(W.LISTS) if self.r.random() < 0.5 else self.word()
    def k_service(self): return self.pick(W.SERVICES) if self.r.random() < 0.4 else self.word() + self.pick(("", "-api", "-service", "-worker"))
    def k_env(self): return self.pick(("staging", "production", "testing"))
    def k_unit(self): return self.pick(W.UNITS)
    def k_activity(self): return self.pick(W.ACTIVITIES)
    def k_carrier(self): return self.pick(W.CARRIERS)
    def k_place(self): return self.pick((self.city, lambda: "room " + str(self.r.randrange(1, 500)), lambda: "the " + self.word()))()
    def k_pick(self, arg): return self.pick(arg.split("|"))
    def k_enum(self, arg): return self.pick(arg.split("|"))

    def k_bool(self):
        return (self.r.random() < 0.6,) * 2

    def k_int(self, arg="1:99"):
        lo, hi = map(int, arg.split(":"))
        v = self.r.randrange(lo, hi + 1)
        if 0 <= v <= 12 and self.r.random() < 0.12:
            return NUMBERS[v], v
        if v >= 1000 and self.r.random() < 0.2:
            return f"{v:,}", v
        return str(v), v

    def k_num(self, arg="1:900"):
        v = self.number(*map(int, arg.split(":")))
        return str(v), v

    def k_money(self):
        v = self.number(1, self.pick((20, 100, 900, 9000)))
        return str(v), v

    def k_title(self):
        x = self.r.random()
        t = self.accent(self.phrase(1, 3))
        if x < 0.5:
            t = t.title()
        elif x < 0.75:
            t = t[0].upper() + t[1:]
        if x > 0.93:
            t = self.pick(("The ", "A ", "My ", "No ")) + t
        return t

    def k_text(self):
        return self.k_sentence()

    def k_phrase(self):
        return self.k_sentence() if self.r.random() < 0.4 else self.phrase(1, 4)

    def k_topic(self):
        x = self.r.random()
        if x < 0.2:
            return self.word() + self.pick((" in ", " from ", " near ")) + self.city()
        if x < 0.3:
            return self.person()
        return self.phrase(1, 4)

    def k_email(self):
        a = self.pick((lambda: self.pick(self.first).lower(), self.word, self.pseudo, lambda: self.word() + "." + self.word()))()
        a = a.encode("ascii", "ignore").decode() or "info"
        d = self.pick(("example.com", "example.org", "mail.net", "x.no"))
        if self.r.random() < 0.5:
            d = self.word() + self.pick((".com", ".org", ".io", ".net", ".de"))
        return f"{a}@{d}"

    def k_phone(self):
        r = self.r
        return self.pick((lambda: f"+{r.randrange(1, 99)} {r.randrange(100, 999)} {r.randrange(1000, 9999)}",
                          lambda: f"555-{r.randrange(1000, 9999)}", lambda: f"0{r.randrange(10**7, 10**8)}"))()

    def k_url(self):
        return f"https://{self.pick(('', 'www.', 'docs.'))}{self.word()}.{self.pick(('com', 'org', 'io'))}" + \
            self.pick(("", f"/{self.word()}", f"/{self.word()}/{self.r.randrange(1, 999)}"))

    def k_host(self):
        return self.word() + self.pick((".example.com", ".local", ".net", f"-{self.r.randrange(1, 40)}"))

    def k_ip(self):
        return ".".join(str(self.r.randrange(1, 255)) for _ in range(4))

    def k_path(self):
        p = self.pick(("", "", "/", "./", "~/")) + "".join(
            (self.pick(W.FOLDERS) if self.r.random() < 0.6 else self.word()) + "/" for _ in range(self.pick((0, 1, 1, 2, 3))))
        return p + self.word() + self.pick(("", "", f"_{self.word()}", f"-{self.r.randrange(1, 99)}")) + "." + self.pick(W.EXTS)

    def k_dir(self):
        return self.pick(("", "/", "./", "~/")) + "/".join(
            self.pick(W.FOLDERS) if self.r.random() < 0.6 else self.word() for _ in range(self.pick((1, 1, 2, 3)))) + self.pick(("", "", "/"))

    def k_glob(self):
        return self.pick((f"*.{self.pick(W.EXTS)}", f"{self.word()}*", f"*_{self.word()}.{self.pick(W.EXTS)}", f"**/*.{self.pick(W.EXTS)}"))

    def k_branch(self):
        return self.pick(("main", "dev", "")) or self.pick(("feature/", "fix/", "", "")) + self.word() + self.pick(("", "-" + self.word()))

    def k_hex(self):
        return "".join(self.pick("0123456789abcdef") for _ in range(7))

    def k_ver(self):
        return self.pick(("", "v")) + ".".join(str(self.r.randrange(0, 20)) for _ in range(self.pick((2, 3))))

    def k_repo(self):
        return self.word() + "/" + self.word() if self.r.random() < 0.7 else self.word()

    def k_channel(self):
        return self.pick(("#", "#", "")) + self.word()

    def k_address(self):
        return f"{self.r.randrange(1, 200)} {self.word().capitalize()} {self.pick(('Street', 'Road', 'Avenue', 'Lane', 'Square'))}"

    def k_flightno(self):
        return self.pick(("LH", "BA", "SK", "AF", "KL", "UA", "DL", "W6")) + self.pick(("", " ")) + str(self.r.randrange(10, 9999))

    def k_ticker(self):
        return self.pick(W.TICKERS) if self.r.random() < 0.6 else "".join(self.pick("ABCDEFGHKLMNPRSTXZ") for _ in range(self.pick((3, 4))))

    def k_user(self):
        return self.pick((self.word, self.pseudo, lambda: self.word() + str(self.r.randrange(1, 99)), lambda: self.word()[0] + self.pseudo()))()

    def k_expr(self):
        r = self.r
        a, b, c = (r.randrange(2, 999) for _ in range(3))
        o = self.pick("+-*/")
        return self.pick((f"{a} {o} {b}", f"{a} {o} {b} {self.pick('+-*')} {c}", f"({a} + {b}) {o} {c}", f"{a}{o}{b}", f"sqrt({a})", f"{a}^{r.randrange(2, 9)}", f"{self.number()} {o} {b}"))

    def k_date(self):
        r = self.r
        y, m, d = r.randrange(2024, 2028), r.randrange(1, 13), r.randrange(1, 29)
        iso, x = f"{y}-{m:02d}-{d:02d}", r.random()
        M = W.MONTHS[m - 1]
        th = "th" if 10 < d < 20 else {1: "st", 2: "nd", 3: "rd"}.get(d % 10, "th")
        return (iso if x < 0.45 else f"{M} {d}, {y}" if x < 0.7 else f"{d} {M} {y}" if x < 0.85 else f"{M} {d}{th}, {y}"), iso

    def k_clock(self):
        h, m, x = self.r.randrange(0, 24), self.pick((0, 0, 15, 30, 45, 5, 50)), self.r.random()
        iso = f"{h:02d}:{m:02d}"
        if x < 0.5:
            return iso, iso
        h12, ap = h % 12 or 12, "am" if h < 12 else "pm"
        sp = self.pick(("", " "))
        return (f"{h12}{sp}{ap}" if m == 0 else f"{h12}:{m:02d}{sp}{ap}"), iso

    # -- copied as written, however odd
    def k_tod(self):
        """A time of day in the user's own words."""
        r, h, m = self.r, self.r.randrange(1, 13), self.pick((0, 5, 10, 15, 20, 30, 40, 45, 55))
        ap = self.pick(("am", "pm", "am", "pm", "a.m", "p.m", "AM", "PM"))
        x = int(r.random() * 12)
        if x < 4:
            return f"{h}{ap}" if x < 2 else f"{h} {ap}"
        if x < 7:
            return f"{h}:{m:02d}{self.pick(('', ' '))}{ap}"
        if x == 7:
            return f"{r.randrange(0, 24)}{self.pick('hH')}{self.pick(('', f'{m:02d}'))}"
        if x == 8:
            return f"{r.randrange(0, 24)}{self.pick(':.')}{m:02d}"
        if x == 9:
            return self.pick(("noon", "midnight", "dawn", "lunchtime", "tea time", "sunset"))
        return self.pick((f"{h} o'clock", f"half past {NUMBERS[h]}", f"quarter to {NUMBERS[h]}", f"ten past {h}"))

    def k_qty(self):
        u = self.pick(("kg", "g", "mg", "ml", "l", "cl", "cm", "mm", "m", "km", "lb", "oz", "GB", "MB", "TB", "kWh", "W", "V", "%", "x", "px", "pt", "°C", "mph", "k", "cups", "slices"))
        return f"{self.number(1, self.pick((9, 60, 900)))}{self.pick(('', '', ' ') if len(u) < 4 else (' ',))}{u}"

    def k_span(self):
        r, n = self.r, self.r.randrange(2, 91)
        return self.pick((f"{n}min", f"{n} min", f"{n}s", f"{n} seconds", f"{n}h", f"{n} hours", f"{n} minutes", f"{n} days", f"{n}d", f"{n}m",
                          f"{r.randrange(1, 9)}h{r.randrange(1, 60):02d}", f"{r.randrange(1, 9)}h {n}m", f"{self.pick(NUMBERS[2:])} {self.pick(('hours', 'days', 'weeks', 'minutes'))}",
                          "half an hour", "an hour", "a week", f"{n}ms", f"{r.randrange(1, 9)}.5 hours", f"{r.randrange(0, 9)}:{r.randrange(10, 60)}"))

    def k_raw(self):
        """Codes, versions, names of settings and whatever else must not be tidied up."""
        r, x = self.r, int(self.r.random() * 14)
        a, n = self.pick((self.word, self.pseudo))(), r.randrange(1, 10 ** self.pick((1, 2, 3, 4)))
        if x < 3:
            return self.ident()
        if x == 3:
            return "".join(self.pick("abcdefghjkmnpqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789") for _ in range(self.pick((4, 5, 6, 8, 10))))
        if x == 4:
            return self.pick((f"{a}-{n}", f"{a}_{n}", f"{a}{n}", f"{a.upper()}_{n}", f"{a.upper()}{n}", f"{n}{a[0]}", f"{n}{a[0].upper()}"))
        if x == 5:
            return self.pick((f"v{r.randrange(0, 30)}", f"v{r.randrange(0, 9)}.{n}", f"{r.randrange(0, 9)}.{r.randrange(0, 30)}.{n}", f"{r.randrange(0, 9)}.{n}-rc{r.randrange(1, 9)}", f"{r.randrange(1, 9)}.x"))
        if x == 6:
            return self.pick((f"#{n}", f"#{a}", f"@{a}", f"${n}", f"€{n}", f"{n}%", f"+{n}", f"-{n}", f"~{n}", f"<{n}", f">={n}", f"{n}+"))
        if x == 7:
            return self.pick((f"{a}.{self.word()}", f"{a}.{self.word()}.{self.word()}", f"{a}/{self.word()}", f"{a}:{n}", f"{a}={n}", f"{a}::{self.word()}", f"{a}@{n}", f"--{a}", f"-{a[0]}{n}"))
        if x == 8:
            b = self.word()
            return self.pick((a + b.capitalize(), a.capitalize() + b.capitalize(), f"{a}_{b}", f"{a.upper()}_{b.upper()}", f"{a.capitalize()}-{b}", f"{a}{b}"))
        if x == 9:
            return self.pick((f"{n}x{r.randrange(1, 99)}", f"{n}-{n + r.randrange(1, 40)}", f"{n}/{r.randrange(1, 99)}", f"{n}:{r.randrange(1, 99)}", f"{n}.{r.randrange(10, 99)}", f"{n},{r.randrange(1, 99)}"))
        if x == 10:
            return f"{r.randrange(1, 40)}{self.pick('ABCDEF')}" if r.random() < 0.6 else f"{self.pick('ABCDEFGH')}{r.randrange(1, 40)}"
        return self.pick((self.k_tod, self.k_qty, self.k_span, self.k_ver, self.k_hex, self.k_user, self.k_phone, self.k_glob))()

    def k_list(self, kind):
        n = self.pick((1, 2, 2, 3, 3, 4))
        vs = []
        while len(vs) < n:
            v = self.make(kind)[1]
            if v not in vs:
                vs.append(v)
        return join_list(self, [str(v) for v in vs]), vs

    def k_obj(self, arg):
        fs = [f.split("+") for f in arg.split(",")]
        some = [f for f in fs if self.r.random() < 0.75] or [self.pick(fs)]
        sep = self.pick((" ", " ", ": ", " = "))
        parts, val = [], {}
        for n, k in some:
            s, v = self.make(k)
            parts.append(f"{human(n)}{sep}{s}")
            val[n] = v
        return join_list(self, parts), val


def join_list(vals, xs):
    if len(xs) == 1:
        return xs[0]
    if vals.r.random() < 0.25:
        return ", ".join(xs)
    return ", ".join(xs[:-1]) + " and " + xs[-1]


def human(name):
    """due_date, dueDate, due-date -> due date"""
    return re.sub(r"([a-z])([A-Z])", r"\1 \2", name).replace("_", " ").replace("-", " ").replace(".", " ").lower()


def camel(s):
    p = s.split("_")
    return p[0] + "".join(x.capitalize() for x in p[1:])


# ---- tools -------------------------------------------------------------------------------------------------------

class Param:
    __slots__ = ("name", "kind", "desc", "req", "slot", "phrases")

    def __init__(self, name, kind, desc, req, slot=None, phrases=()):
        self.name, self.kind, self.desc, self.req, self.slot, self.phrases = name, kind, desc, req, slot or name, phrases

    def schema(self):
        k, _, arg = self.kind.partition(":")
        if k == "enum":
            s = {"type": "string", "enum": arg.split("|")}
        elif k == "int":
            s = {"type": "integer"}
        elif k in ("num", "money"):
            s = {"type": "number"}
        elif k == "bool":
            s = {"type": "boolean"}
        elif k == "list":
            s = {"type": "array", "items": {"type": "integer" if arg.startswith("int") else "string"}}
        elif k == "obj":
            s = {"type": "object", "properties": {}}
            for f in arg.split(","):
                n, fk = f.split("+")
                s["properties"][n] = {"type": "integer" if fk.startswith("int") else "string"}
        else:
            s = {"type": "string"}
        if self.desc:
            s["description"] = self.desc
        return s


class Tool:
    name = desc = None
    params = ()
    keys = frozenset()      # topics: two tools of a prompt may not share one
    read = True

    def schema(self):
        f = {"name": self.name}
        if self.desc:
            f["description"] = self.desc
        f["parameters"] = {"type": "object", "properties": {p.name: p.schema() for p in self.params}}
        req = [p.name for p in self.params if p.req]
        if req:
            f["parameters"]["required"] = req
        return f

    def order(self, args):
        return {p.name: args[p.name] for p in self.params if p.name in args}


class Template:
    """One utterance line of everyday.py, parsed."""

    def __init__(self, line):
        self.par = line.startswith("& ")
        self.ask = line.startswith("? ")
        if self.par or self.ask:
            line = line[2:]
        self.flags = {}
        head, bar, tail = line.rpartition("|")
        if bar and "]" not in tail and "{" not in tail:
            line = head
            if "=" in tail:
                k, v = tail.split("=")
                self.flags[k] = v
        self.parts = []          # (text, flag or None, optional)
        for i, t in enumerate(re.split(r"\[(.*?)\]", line)):
            flag = None
            if i % 2 and "|" in t:
                t, f = t.split("|")
                flag = tuple(f.split("="))
            self.parts.append((t, flag, i % 2 == 1))
        self.slots = [m for t, _, o in self.parts if not o for m in re.findall(r"\{(\w+)\}", t)]

    def has(self, w):
        return any(re.search(rf"(?<![{{\w]){w}(?![\w}}])", t, re.I) for t, _, o in self.parts if not o)

    def replaced(self, w, new):
        c = copy.copy(self)
        c.parts = [(re.sub(rf"(?<![{{\w]){w}(?![\w}}])", new, t, flags=re.I), f, o) for t, f, o in self.parts]
        return c


def parse_everyday():
    out = []
    for block in (everyday.TOOLS.strip() + "\n\n" + trades.TOOLS.strip()).split("\n\n"):
        lines = block.split("\n")
        group, names = lines[0][1:].split(" ", 1)
        t = {"group": group.lstrip("~"), "held": group.startswith("~"), "names": names.split(","), "desc": lines[1],
             "params": [], "lines": [], "asks": [], "result": None}
        for l in lines[2:]:
            if l.startswith("@"):
                names, kind, *d = l[1:].split(" ", 2)
                t["params"].append((names.split("|"), kind.rstrip("!"), kind.endswith("!"), d[0] if d else ""))
            elif l.startswith(">"):
                form = "rows" if l.startswith(">>") else "text" if l.startswith(">=") else "object"
                spec = l.lstrip(">=").strip()
                if form != "text":
                    spec = [tuple(f.strip().split(" ", 1)) for f in spec.split(";")]
                t["result"] = (form, spec)
            else:
                tp = Template(l)
                if not tp.ask:
                    need = {p[0][0] for p in t["params"] if p[2]}
                    have = set(tp.slots) | set(tp.flags)
                    assert need <= have, (l, need - have)
                (t["asks"] if tp.ask else t["lines"]).append(tp)
        out.append(t)
    return out


EVERYDAY = parse_everyday()
VERBS = []
for _l in W.VERBS:
    _n, _c, _p = _l.split("|")
    VERBS.append((_n, _c == "r", _p.split(",")))


STOP = set("with from that this between number name title what show more when where find will text line".split())


class Everyday(Tool):
    def __init__(self, g, d):
        v, r = g.v, g.r
        self.d = d
        self.keys = frozenset(["g:" + d["group"]])
        style_camel = r.random() < 0.2
        self.name = v.pick(d["names"])
        if r.random() < 0.06:
            self.name = v.pseudo(3)
        self.desc = d["desc"] if r.random() < 0.85 else d["desc"].rstrip(".") if r.random() < 0.5 else d["desc"] + v.pick((" Use it when the user asks for it.", " Returns JSON.", " Fast and reliable."))
        self.params = []
        for names, kind, req, desc in d["params"]:
            if not req and r.random() < 0.25:
                continue
            n = names[0] if r.random() < 0.5 else g.name_of(names)
            odd = r.random()
            if odd < 0.08:
                n = v.pseudo(2) + "_" + names[0]
            elif odd < 0.35 and g.split != "held":
                n = v.pick((v.word, v.pseudo, lambda: v.word() + "_" + v.word()))()
            if style_camel:
                n = camel(n)
            if any(p.name == n for p in self.params):
                n = names[0]
            keep = kind.split(":")[0] in ("date", "clock") or odd < (0.2 if g.split == "held" else 0.35) or r.random() < 0.75
            self.params.append(Param(n, kind, g.more(desc, kind) if keep else None, req, names[0]))
        self.by = {p.slot: p for p in self.params}
        self.primary = next((p for p in self.params if p.req), None)
        self.lines = [t for t in d["lines"] if all(s in self.by for s in t.slots) and all(f in self.by for f in t.flags)]
        self.asks = [t for t in d["asks"] if all(s in self.by for s in t.slots)] if self.primary else []
        if g.split != "held" and r.random() < 0.4:
            self.reword(g)
        self.read = d["result"][0] != "object" or not any(f[0] in ("status", "deleted") for f in d["result"][1])

    def reword(self, g):
        """A word that description and utterances share becomes another one in both: matching, not memory."""
        desc = self.desc.lower()
        cands = [w for w in set(re.findall(r"[a-z]{4,}", desc + " " + human(self.name))) if w not in STOP]
        cands = sorted(w for w in cands if sum(t.has(w) for t in self.lines) >= 1)
        if not cands:
            return
        w = g.v.pick(cands)
        new = g.v.pseudo() if g.r.random() < 0.5 else g.v.word()
        if not new.isascii() or "'" in new:
            return
        self.lines = [t.replaced(w, new) for t in self.lines if t.has(w)]
        self.asks = [t.replaced(w, new) for t in self.asks if t.has(w)]
        if w in desc:
            self.desc = re.sub(rf"\b{w}\b", new, self.desc, flags=re.I)
        else:
            self.desc += f" Does the {new}."
        self.name = self.name.replace(w, new).replace(w.capitalize(), new.capitalize())
        self.keys = self.keys | {"w:" + new}

    def utter(self, g, many=1, missing=False):
        """(text, [arguments]); many > 1: a list of values for the primary."""
        v = g.v
        lines = self.asks if missing else [t for t in self.lines if t.par] if many > 1 else self.lines
        if not lines:
            return None
        t = v.pick(lines)
        spoken, args = {}, {}
        for k, x in t.flags.items():
            args[self.by[k].name] = parse_flag(x)
        text = ""
        for part, flag, opt in t.parts:
            slots = re.findall(r"\{(\w+)\}", part)
            if opt:
                if not all(s in self.by for s in slots) or (flag and flag[0] not in self.by) or g.r.random() < 0.5:
                    continue
                if flag:
                    args[self.by[flag[0]].name] = parse_flag(flag[1])
            for s in slots:
                p = self.by[s]
                if many > 1 and p is self.primary:
                    vs, ss = [], []
                    for _ in range(60):
                        a, b = v.make(p.kind)
                        if b not in vs:
                            vs.append(b)
                            ss.append(a)
                        if len(vs) == many:
                            break
                    if len(vs) < many:
                        return None
                    spoken[s], args[p.name] = join_list(v, ss), vs
                else:
                    for _ in range(20):         # two values of one request differ
                        a, b = v.make(p.kind)
                        if a not in spoken.values():
                            break
                    spoken[s], args[p.name] = a, b
            text += re.sub(r"\{(\w+)\}", lambda m: spoken[m.group(1)], part)
        many_args = [args]
        if many > 1:
            many_args = [dict(args, **{self.primary.name: x}) for x in args[self.primary.name]]
        values = [s for s in spoken.values()]
        return g.frame(text, values, self), [self.order(a) for a in many_args]

    def result(self, g, args):
        form, spec = self.d["result"]
        return g.make_result(form, spec)


def parse_flag(x):
    return {"true": True, "false": False}.get(x, x)


PROC_KINDS = [
    # kind, parameter names, descriptions, ways to say it (bare = only one such parameter a tool)
    ("city", "city,location,town,place,destination,region", "Name of the city|Where|City", "in {v},near {v},for {v},around {v}"),
    ("person", "person,customer,owner,employee,client,member,patient,author,recipient_name,guest", "Full name|Name of the person|Who", "for {v},of {v},on behalf of {v}"),
    ("email", "email,address,recipient,contact_email,notify_email", "Mail address|Email address", "to {v},for {v},with the address {v}"),
    ("id", "id,code,number,reference,key,serial,identifier", "Identifier|Unique id|Reference number", "{v},number {v},with the id {v},{v}"),
    ("date", "date,day,due_date,start_date,valid_until", "Day as YYYY-MM-DD|Date in the format YYYY-MM-DD", "on {v},for {v},{v}"),
    ("clock", "time,start_time,at,hour", "Time as HH:MM|Time of day (HH:MM)", "at {v},for {v}"),
    ("title", "title,name,label,caption", "Title|Name to use", "called \"{v}\",named {v},titled \"{v}\",with the name {v}"),
    ("text", "text,comment,message,note,description,reason", "Free text|Comment|Message text", "with the {h} \"{v}\",saying \"{v}\",{h}: {v}"),
    ("url", "url,link,source_url,endpoint", "Address|URL", "from {v},at {v}"),
    ("path", "path,file,filename,output_file,source", "Path of a file|File", "from {v},in the file {v},at {v}"),
    ("lang", "language,lang,target_language", "Language|Language to use", "in {v}"),
    ("word", "category,topic,group,tag,brand,material,keyword,project,team,department,channel,queue,zone", "Category|Which one", None),
    ("int", "count,limit,quantity,size,rounds,floor,age,width,height,length,depth,pages,copies,guests,seats,rows,level,days,weeks,base,side,radius,term,year,retries,workers,mass,distance,speed,volume,duration", "Number|How many|Value", None),
    ("num", "weight,price,rate,threshold,temperature,ratio,budget,factor,angle,score,tolerance,interest,pressure,density,voltage,amount,max_price,dose,value,velocity,area", "Value|Number|Amount", None),
    ("enum", "mode,priority,status,type,format,color,size_class,unit,strategy,sort_by,quality,visibility", "Which kind|One of the values", None),
    ("bool", "urgent,recursive,verbose,public,notify,force,dry_run,express,include_history,overwrite,insured,refundable,vegetarian,active_only", "Flag|Optional switch|Whether to do so", None),
    ("list", "tags,items,names,fields,members,labels,ids,keywords,colors,values", "List of values|Several values", None),
    ("obj", "options,details,settings,filter,attributes,config", "Nested settings|Details", None),
]
PROC_KINDS = [(k, n.split(","), d.split("|"), p.split(",") if p else None) for k, n, d, p in PROC_KINDS]
PROC_WEIGHT = [8, 8, 4, 10, 6, 3, 6, 5, 2, 3, 2, 8, 10, 8, 7, 5, 4, 3]
# kinds and phrases that the held-out cases do not have: values that must be copied as they stand
EXACT_KINDS = [
    ("tod", "time_of_day,slot,arrival,departure,opening,closing,pickup_time,wake_up", "Time of day|Hour of the day|Clock time, as said", "at {v},by {v},from {v}"),
    ("qty", "amount,quantity,weight,dose,portion,volume,length,load", "With its unit|Amount and unit|Quantity", None),
    ("span", "duration,period,interval,timeout,delay,window", "How long|Duration|Time span", "for {v}"),
    ("raw", "code,key,tag,serial,model,part,label,spec,plate,value,token,selector,pattern,batch,slot,setting", "Exact text|As written|Value|Code", None),
    ("phone", "phone,phone_number,mobile,fax", "Phone number|Number to call", None),
    ("user", "user,username,login,account,handle", "User name|Account", None),
    ("host", "host,server,node,machine", "Host|Server|Machine", "on {v}"),
]
EXACT_KINDS = [(k, n.split(","), d.split("|"), p.split(",") if p else None) for k, n, d, p in EXACT_KINDS]
ALL_KINDS, ALL_WEIGHT = PROC_KINDS + EXACT_KINDS, PROC_WEIGHT + [5, 4, 4, 8, 2, 2, 2]
SLOT_PHRASES = ["with {h} {v}", "with the {h} {v}", "with a {h} of {v}", "{h} {v}", "using {v} as the {h}", "where the {h} is {v}",
                "and {h} {v}", "{h}: {v}", "at a {h} of {v}", "the {h} should be {v}", "{h} = {v}", "with {h} set to {v}"]
MORE_PHRASES = ["{v} as the {h}", "{v} for the {h}", "its {h} is {v}", "whose {h} is {v}", "({h} {v})", "by {h} {v}", "having {h} {v}", "set {h} to {v}",
                "I want {v} as {h}", "where {h} is {v}", "take {v} for {h}", "{h} should be {v}"]
VERB_FRAMES = "{w} up,{w} out,{w} off,{w} down,{w} back,{w} in,take {w} of,make {w},make it {w},put {w} on,put the {w} on,give {w} to,set a {w} for,do a {w} of,put back the {w} of,go through the {w} of,get {w} of,bring in the {w} of,{w} to the top,give a new {w} to,have a {w} at,{w} and {w2},run a {w} of,put in {w}".split(",")
QUANTA = "units,meters,kg,percent,euros,dollars,points,degrees,days,hours,minutes,km,cm,pieces,grams,liters,years,people,items,pages,m/s,miles,times,weeks,feet,watts".split(",")
ENUM_WORDS = "fast,slow,auto,manual,low,medium,high,draft,final,public,private,json,csv,xml,pdf,html,small,large,red,green,blue,asc,desc,daily,weekly,monthly,basic,premium,gold,silver,strict,loose,full,partial,internal,external,dark,light,standard,express,economy,metric,imperial,north,south,short,long,hot,cold,raw,cooked,new,used,open,closed,pending,paid,male,female,left,right,single,double,easy,hard,soft,quiet,loud".split(",")


class Procedural(Tool):
    def __init__(self, g, verb=None, noun=None):
        v, r = g.v, g.r
        self.noun = noun or (v.pick(g.nouns) if r.random() < (0.9 if g.split == "held" else 0.5) else
                             v.pick((v.word, v.pseudo, lambda: v.word() + " " + v.word()))())
        # verbs that can only be matched, not known: with them the user's word is the tool's word
        invented = verb is None and r.random() < (0.2 if g.split == "held" else 0.35)
        if invented:
            x = v.pseudo(v.pick((2, 2, 3))) if r.random() < 0.45 else v.word()
            verb = (x, r.random() < 0.3, [v.fill(v.pick(VERB_FRAMES)) if g.split != "held" and r.random() < 0.3 else x])
        self.verb = verb or v.pick(g.verbs)
        vname, self.read, self.phr = self.verb
        if g.split == "held" or r.random() < (0.6 if g.few else 0.3):
            self.phr = [v.pick(self.phr)]
        self.keys = frozenset([f"n:{self.noun}:{'r' if self.read else vname}"])
        self.opaque = r.random() < 0.08
        self.service = v.pseudo(2) if r.random() < 0.12 else None
        vn = self.phr[0] if r.random() < 0.75 or " " in self.phr[0] else v.pick([p for p in self.phr if " " not in p])
        vn, nn = vn.replace(" ", "_"), self.noun.replace(" ", "_").replace("-", "_")
        style = int(r.random() * 9)
        self.style_camel = style == 1
        if self.opaque:
            self.name = v.pseudo(4)
        elif style == 1:
            self.name = camel(f"{vn}_{nn}")
        elif style == 2:
            self.name = f"{nn}_{vn}"
        elif style == 3:
            self.name = f"{vn}-{nn}".replace("_", "-")
        elif style == 4:
            self.name = f"{nn}.{vn}"
        elif style == 5 and self.service:
            self.name = f"{self.service}_{vn}_{nn}"
        elif style == 6:
            self.name = f"{vn}_{nn}_{v.pick(('info', 'data', 'details', 'tool', 'by_id', 'v2', 'record'))}"
        else:
            self.name = f"{vn}_{nn}"
        dv = v.pick(self.phr)
        art = v.pick(("a", "the", "one")) + " " if not self.noun.endswith("s") else ""
        core = f"{dv} {art}{self.noun}"
        x = r.random()
        if x < 0.55:
            d = core.capitalize() + "."
        elif x < 0.7:
            d = f"Use this to {core}."
        elif x < 0.8:
            d = f"{core.capitalize()}" + v.pick((" in the system.", " and return the result.", " for the user.", "", " of the given kind."))
        elif x < 0.9:
            d = f"Tool to {core} and report back."
        else:
            d = f"This function can {core}."
        if self.service:
            d = d.rstrip(".") + f" at {self.service}."
        if r.random() < 0.15:
            d += " " + v.pick(("The result is returned as JSON.", "Requires a valid session.", f"Use it when the user wants to {dv} {art}{self.noun}.",
                               f"Call it once for each {self.noun}.", "Do not use it for anything else.", "Values are case-sensitive.",
                               "Fails if the entry does not exist.", f"Works for every kind of {self.noun}.", v.k_sentence().capitalize() + "."))
        self.desc = d
        if not self.opaque and not invented and r.random() < 0.06:
            self.desc = None
        self.params = []
        self.make_params(g)
        self.primary = next((p for p in self.params if p.req), None)
        self.fields = None

    def make_params(self, g):
        v, r = g.v, g.r
        n = v.pick((0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 5))
        used, names = set(), set()
        for i in range(n):
            kinds, weight = (PROC_KINDS, PROC_WEIGHT) if g.split == "held" else (ALL_KINDS, ALL_WEIGHT)
            kind, pn, pd, phrases = r.choices(kinds, weight)[0]
            name = g.name_of(pn)
            said = "clock" if kind == "tod" else kind        # both are said with "at": one of them a tool
            bare = phrases is not None and said not in used
            if kind == "id" and r.random() < 0.6:
                name = self.noun.split()[-1].replace("-", "_") + "_" + name
            x, typed = r.random(), g.split != "held"
            if typed:                           # more invented names in training: a name is copied from the schema, not known
                x *= 0.75
            if x < 0.1 and kind not in ("bool",):
                name = v.pseudo(2) + "_" + name
                bare = bare and r.random() < 0.5
            elif x < 0.24:
                name = v.word() + "_" + name
                bare = bare and r.random() < 0.5
            elif x < 0.4:
                name = v.word() + (("_" + v.word()) if r.random() < 0.4 else "")
                typed = False
            elif x < 0.48:
                name = v.pseudo(3)
                typed = False
            if self.style_camel:
                name = camel(name)
            elif r.random() < 0.03:
                name = name.replace("_", "-")
            if name in names or human(name) in {human(q) for q in names} or not name.isascii() or "'" in name:
                continue
            desc = v.pick(pd)
            k = kind
            if kind == "enum":
                vs = r.sample(ENUM_WORDS, v.pick((2, 3, 3, 4)))
                k = "enum:" + "|".join(vs)
            elif kind == "int":
                k = v.pick(("int:1:20", "int:1:99", "int:2:500", "int:1000:90000", "int:0:12"))
            elif kind == "list":
                k = "list:" + v.pick(("word", "word", "person", "int:1:99", "city", "product", "id"))
            elif kind == "obj":
                fs = r.sample(("city+city", "size+int:1:99", "color+word", "owner+person", "code+id", "limit+int:1:50", "kind+word", "email+email"), v.pick((2, 2, 3)))
                k = "obj:" + ",".join(fs)
            if kind not in ("date", "clock") and (typed or not bare):
                if r.random() < 0.35:
                    desc = None
                elif r.random() < 0.4:
                    desc = f"The {human(name)}" + v.pick((".", "", f" of the {self.noun}", f" of the {self.noun}."))
            desc = g.more(desc, k)
            p = Param(name, k, desc, r.random() < (0.65 if kind != "bool" else 0.15), None, phrases if bare else ())
            if bare:
                used.add(said)
            if kind in ("city", "person", "email") and not bare:
                p.phrases = ()
            names.add(name)
            self.params.append(p)

    def say(self, g, p, spoken, value):
        v, h = g.v, human(p.name)
        if p.kind == "bool":
            if value:
                return v.pick((f", {h}", f"with {h} on", f", {h}: yes", f"and set {h} to true", f"with {h} enabled", f", make it {h}"))
            return v.pick((f", not {h}", f"with {h} off", f", {h}: no", f"and set {h} to false", f"with {h} disabled"))
        if p.kind.split(":")[0] in ("int", "num") and g.r.random() < 0.2 and spoken not in NUMBERS and " and " not in spoken and ", " not in spoken:
            spoken = f"${spoken}" if g.r.random() < 0.15 else f"{spoken} {v.pick(QUANTA)}"
        if p.phrases:
            return v.pick(p.phrases).replace("{v}", spoken).replace("{h}", h)
        if p.kind.startswith("enum") and g.r.random() < 0.2:
            return f"with {spoken} {h}"
        if p.kind.startswith("int") and g.r.random() < 0.2 and h.endswith("s"):
            return f"with {spoken} {h}"
        if p.kind.split(":")[0] in ("text", "title") or " " in spoken and g.r.random() < 0.3 and p.kind.split(":")[0] not in ("list", "obj"):
            spoken = f'"{spoken}"'
        more = g.split != "held" and g.r.random() < 0.3
        return v.pick(MORE_PHRASES if more else SLOT_PHRASES).replace("{v}", spoken).replace("{h}", h)

    def utter(self, g, many=1, missing=False):
        v, r = g.v, g.r
        given, args, seen = [], {}, set()
        for p in self.params:
            if missing and p is self.primary:
                continue
            if not p.req and r.random() < 0.5:
                continue
            for _ in range(20):
                s, x = v.make(p.kind)
                if p.kind in ("bool",) or s not in seen:
                    break
            seen.add(s)
            given.append((p, s, x))
            args[p.name] = x
        if missing and not self.primary:
            return None
        many_args = [args]
        if many > 1:
            pr = self.primary
            if pr is None or pr.kind.split(":")[0] in ("bool", "list", "obj", "text", "enum", "date", "clock"):
                return None
            vs, ss = [], []
            for _ in range(60):
                s, x = v.make(pr.kind)
                if x not in vs:
                    vs.append(x)
                    ss.append(s)
                if len(vs) == many:
                    break
            if len(vs) < many:
                return None
            given = [(p, join_list(v, ss) if p is pr else s, x) for p, s, x in given]
            many_args = [dict(args, **{pr.name: x}) for x in vs]
        said = [(p, self.say(g, p, s, x)) for p, s, x in given]
        ids = [t for p, t in said if p.kind == "id" and p.phrases]
        rest = [t for p, t in said if not (p.kind == "id" and p.phrases)]
        r.shuffle(rest)
        tail = ""
        for t in ids + rest:
            tail += t if t.startswith(",") else (", " if r.random() < 0.12 and tail else " ") + t
        verb = v.pick(self.phr)
        det = "the " if r.random() < 0.75 else v.pick(("a ", "my ", "this ", "our ", "")) if not ids else v.pick(("", "our "))
        noun = self.noun
        if self.verb[0] in ("list", "count") and not noun.endswith("s"):
            noun, det = noun + "s", v.pick(("the ", "", "my "))
        core = f"{verb} {det}{noun}{tail}"
        x = r.random()
        if self.read and x < 0.16 and verb not in W.VERBS and self.verb[0] in ("get", "check", "find", "read", "compute", "measure"):
            core = v.pick((f"What is the {noun}{tail}?", f"what's the {noun}{tail}?", f"What {noun} do we have{tail}?", f"do you know the {noun}{tail}?"))
        elif x < 0.24:
            core = f"{v.pick(('I want to', 'I need to', 'I would like to', 'we have to', 'We want to'))} {core}"
        elif x < 0.3:
            core = v.pick((f"The {v.pick(g.nouns)} is fine, but {core}", f"{v.person()} asked me to {core}", f"After the {v.word()} meeting: {core}",
                           f"My {v.word()} is waiting. {core.capitalize()}", f"I am in a hurry, {core}", f"It's about the {v.word()}, {core}"))
        elif x < 0.34 and tail and not self.read:
            core = f"there is {'a ' if not noun.endswith('s') else 'some '}{noun}{tail}, {verb} it"
        return g.frame(core, [s for _, s, _ in given], self), [self.order(a) for a in many_args]

    def result(self, g, args):
        v, r = g.v, g.r
        if self.fields is None:
            n = v.pick((1, 1, 2, 2, 3, 3, 4)) if self.read else v.pick((1, 1, 2))
            fs = r.sample(W.FIELDS, n)
            self.fields = []
            for f in fs:
                name, kind = f.split(":", 1)
                if r.random() < 0.12:
                    name = v.word() + "_" + name if r.random() < 0.5 else v.pseudo(3)
                if self.style_camel:
                    name = camel(name)
                self.fields.append((name, kind))
            if not self.read and r.random() < 0.6:
                self.fields = [("status", "pick:ok|done|success|accepted|queued")] + self.fields[:1]
        if self.read and self.verb[0] in ("list", "find") and r.random() < 0.6:
            return g.make_result("rows", self.fields[:3])
        if r.random() < 0.08:
            return g.make_result("text", "sentence")
        return g.make_result("object", self.fields)


class Intent(Tool):
    """A CLINC150 intent: no parameters."""
    params = ()
    primary = None

    def __init__(self, g, intent, desc, domain, lines):
        v, r = g.v, g.r
        self.lines = lines
        self.keys = frozenset(["d:" + domain])
        n = intent
        x = r.random()
        self.name = camel(n) if x < 0.2 else v.pick(("get_", "do_", "handle_", "")) + n if x < 0.5 else n
        if r.random() < 0.06:
            self.name = v.pseudo(3)
        self.desc = desc + v.pick(("", ".", ".", " for the user."))
        self.read = True
        self.fields = None

    def utter(self, g, many=1, missing=False):
        if many > 1 or missing:
            return None
        return g.frame(g.v.pick(self.lines), None, self), [{}]

    result = Procedural.result
    verb = ("get",)
    style_camel = False


class Snips(Tool):
    primary = None
    fields = None
    verb = ("get",)
    style_camel = False

    def __init__(self, g, intent, lines):
        names, desc, slots = SNIPS[intent]
        v, r = g.v, g.r
        self.lines, self.read = lines, True
        self.name = v.pick(names)
        self.desc = desc + v.pick(("", "."))
        self.keys = frozenset({"GetWeather": ["g:weather"], "PlayMusic": ["g:music", "d:home"], "BookRestaurant": ["g:table", "g:restaurant", "d:food"],
                               "AddToPlaylist": ["g:music2"], "RateBook": ["g:rate"], "SearchCreativeWork": ["g:movie", "g:library"],
                               "SearchScreeningEvent": ["g:movie2"]}[intent])
        self.params = []
        for s, pn in slots.items():
            if r.random() < 0.8 or len(slots) == 1:
                kind = "int" if s in ("party_size_number", "rating_value", "best_rating") else "word"
                self.params.append(Param(v.pick(pn), kind, human(s).capitalize() if r.random() < 0.4 else None, False, s))
        self.by = {p.slot: p for p in self.params}

    def utter(self, g, many=1, missing=False):
        if many > 1 or missing:
            return None
        v, r = g.v, g.r
        new = {"city": v.city, "artist": v.person, "track": v.k_title, "album": v.k_title, "playlist": v.k_phrase, "object_name": v.k_title,
               "movie_name": v.k_title, "entity_name": v.k_title, "restaurant_name": v.k_title, "location_name": v.k_title}
        for _ in range(8):
            text, args, ok = "", {}, True
            for t, slot in v.pick(self.lines):
                if slot in self.by:
                    p = self.by[slot]
                    if slot in new and r.random() < 0.5:
                        t = new[slot]()
                        if r.random() < 0.4:
                            t = t.lower()
                    if p.name in args:
                        ok = False
                        break
                    val = t.strip()
                    if p.kind == "int":
                        val = NUMBERS.index(val.lower()) if val.lower() in NUMBERS else int(val) if val.isdigit() else None
                        if val is None:
                            ok = False
                            break
                    args[p.name] = val
                text += t
            if ok and args:
                return text.strip(), [self.order(args)]
        return None

    def result(self, g, args):
        return Procedural.result(self, g, args)


# ---- the generator -----------------------------------------------------------------------------------------------

PREFIX = ["please ", "can you ", "could you ", "could you please ", "can you please ", "I need you to ", "I'd like you to ", "would you ", "hey, ",
          "hi, ", "ok, ", "now ", "quickly ", "go ahead and ", "let's ", "you should ", "kindly ", "please go and ", "so, ", "next, "]
QUESTION_PREFIX = {"can you ", "could you ", "could you please ", "can you please ", "would you "}
SUFFIX = [" please", ", please", " for me", ", thanks", " now", " right now", " asap", ", will you", ", ok", " today", " quickly", ", thank you", " when you can", " immediately"]


class Generator:
    def __init__(self, seed, split="train", data=None, tokenizer=None):
        self.r = random.Random(seed)
        self.split = split
        pieces = []
        if split == "train" and tokenizer:
            import tok
            e = tok.Encoder(tokenizer)
            pieces = sorted({x for x in (e.decode([i]).strip().lower() for i in e.text) if len(x) > 1 and x.isalpha() and x.isascii()})
        self.intents, self.snips, self.oos, extra, self.prose = {}, {}, [], [], []
        if split == "train" and data:
            extra = self.load(data)
        self.v = Values(self.r, split, extra, pieces)
        keep = W.held if split == "held" else (lambda s: not W.held(s))
        self.nouns = [n for n in W.NOUNS if keep(n)]
        self.verbs = [x for x in VERBS if keep("verb " + x[0])]
        self.hand = [d for d in EVERYDAY if d["held"] == (split == "held")]
        self.pools, self.few, self.salt = (self.nouns, self.verbs), False, ""

    def narrow(self):
        """Every other document has pools of the held-out side's size: what differs then is the words, not how often they collide."""
        self.few = self.r.random() < 0.5
        self.v.narrow(self.few)
        self.nouns, self.verbs = self.pools
        if self.few:
            self.nouns, self.verbs = self.r.sample(self.nouns, 45), self.r.sample(self.verbs, 18)
            self.salt = str(self.r.randrange(1000))

    def load(self, data):
        d = json.load(lzma.open(os.path.join(data, "data_full.json.xz"), "rt", encoding="utf-8"))
        by = {}
        for part in ("train", "val", "test"):
            for t, i in d[part]:
                by.setdefault(i, []).append(t)
        for line in INTENTS:
            dom, name, desc = line.split("|")
            self.intents[name] = (desc, dom, by[name])
        self.oos = [t for p in ("oos_train", "oos_val", "oos_test") for t, _ in d[p]]
        for line in lzma.open(os.path.join(data, "snips.jsonl.xz"), "rt", encoding="utf-8"):
            o = json.loads(line)
            self.snips.setdefault(o["intent"], []).append(o["parts"])
        text = " ".join(self.oos) + " ".join(t for v in by.values() for t in v)
        for v in self.snips.values():
            for parts in v:
                text += " " + "".join(p[0] for p in parts)
        import pydoc_data.topics
        for t in pydoc_data.topics.topics.values():
            self.prose += [p for p in t.split("\n\n") if 200 < len(p) < 3000 and p.isascii()]
            text += t
        ws = sorted(set(re.findall(r"\b[a-z]{3,11}\b", text)))
        return ws

    def more(self, desc, kind):
        """Now and then a description holds an example or a default, which must not be copied."""
        if not desc or kind.split(":")[0] in ("bool", "obj", "list") or self.r.random() > 0.12:
            return desc
        x = self.v.make(kind)[1]
        return desc.rstrip(".") + self.v.pick((f", e.g. {x}", f" (e.g. {x}).", f", for example \"{x}\"", f". Defaults to {x}.", f" (default: {x})", f", such as {x}."))

    def name_of(self, names):
        good = [n for n in names if W.held(n) == (self.split == "held")]
        if self.few:
            good = [n for n in good if W.held(n + self.salt)] or good
        return self.v.pick(good or names)

    # -- utterance frames: politeness, fillers, case
    def frame(self, text, values, tool):
        v, r = self.v, self.r
        if values is None:                       # real user lines stay as they are
            return text if r.random() < 0.8 else text.capitalize() + v.pick(("", ".", "?"))
        values = [x for x in values if isinstance(x, str)]
        lower = text[:1].islower()
        q = text.endswith("?")
        body = text.rstrip("?.")
        first = body.split(" ")[0].lower()
        if lower and not q and first not in ("what", "how", "where", "which", "do", "is", "are", "i", "i'm", "any", "did", "has", "who", "when", "we", "we're", "there", "does", "can", "please", "it's", "there's", "time") and r.random() < 0.45:
            p = v.pick(PREFIX)
            if body[:1].islower():
                body = p + body
                q = p in QUESTION_PREFIX and r.random() < 0.7
        elif r.random() < 0.06:
            body = v.pick(("Hi! ", "Hello, ", "Hey, ", "Quick question: ", "One more thing: ", "Also, ")) + body
        last = body[-1:]
        if r.random() < 0.2 and last != '"' and not (values and body.endswith(tuple(values)) and r.random() < 0.3):
            s = v.pick(SUFFIX)
            timed = any(p.kind.split(":")[0] in ("date", "clock", "when", "date_raw", "tod", "span") or "date" in p.name or "time" in p.name for p in tool.params)
            if not (timed and s in (" today", " now", " right now", " asap", " immediately")):
                body += s
        body += "?" if q else v.pick((".", "", "", "")) if last != '"' else ""
        if r.random() < 0.6:
            body = body[:1].upper() + body[1:] if not (values and body.startswith(tuple(values))) else body
        elif r.random() < 0.2 and values is not None:
            spots = [s for s in values if s]
            if spots:
                parts = re.split("(" + "|".join(re.escape(s) for s in sorted(spots, key=len, reverse=True)) + ")", body)
                body = "".join(p if i % 2 else p.lower() for i, p in enumerate(parts))
            else:
                body = body.lower()
        return body

    # -- tools of a prompt
    def new_tool(self):
        r, x = self.r, self.r.random()
        if self.split == "held":
            return Everyday(self, self.v.pick(self.hand)) if x < 0.2 else Procedural(self)
        if x < 0.36:
            return Everyday(self, self.v.pick(self.hand))
        if x < 0.42 and self.snips:
            k = self.v.pick(sorted(self.snips))
            return Snips(self, k, self.snips[k])
        if x < 0.50 and self.intents:
            k = self.v.pick(sorted(self.intents))
            desc, dom, lines = self.intents[k]
            return Intent(self, k, desc, dom, lines)
        return Procedural(self)

    def tool_set(self, n):
        r = self.r
        tools, keys, names = [], set(), set()
        tries = 0
        while len(tools) < n and tries < 6 * n + 10:
            tries += 1
            t = None
            if tools and r.random() < 0.22:      # a near miss: the same noun or the same verb as another tool
                o = self.v.pick(tools)
                if isinstance(o, Procedural):
                    t = Procedural(self, noun=o.noun) if r.random() < 0.6 else Procedural(self, verb=o.verb)
            t = t or self.new_tool()
            if t.keys & keys or t.name in names:
                continue
            # CLINC's domains overlap with many hand-written tools: keep the two kinds apart
            if isinstance(t, Intent) and any(isinstance(o, (Everyday, Snips)) for o in tools):
                continue
            if isinstance(t, (Everyday, Snips)) and any(isinstance(o, Intent) for o in tools):
                continue
            keys |= t.keys
            names.add(t.name)
            tools.append(t)
        return tools

    # -- results and answers
    def dump(self, x):
        y = self.r.random()
        if y < 0.65:
            return json.dumps(x, ensure_ascii=False)
        if y < 0.9:
            return json.dumps(x, ensure_ascii=False, separators=(",", ":"))
        return json.dumps(x, ensure_ascii=False, indent=2)

    def make_result(self, form, spec):
        """(text, answer, facts): facts is [(question name, value)] for follow-up questions."""
        v, r = self.v, self.r
        x = r.random()
        if x < 0.05:
            e = v.pick(("not found", "permission denied", "timeout", "service unavailable", "invalid argument", "no such entry", v.phrase(2, 4)))
            k = v.pick(("error", "error", "message"))
            o = {k: e} if k == "error" else {"status": "error", "message": e}
            return self.dump(o), f"That failed: {e}.", []
        if form == "text" or x < 0.09:
            s = v.k_sentence() if form == "text" else v.pick(("ok", "done", "success", v.k_sentence()))
            return s, f"The result is: {s}", []
        if form == "rows":
            n = v.pick((0, 1, 2, 2, 3, 3, 4, 5))
            rows = [{k: v.make(kind)[1] if not kind == "pick:true" else True for k, kind in spec} for _ in range(n)]
            key = v.pick(("results", "items", "data", "entries", "list", "hits"))
            y = r.random()
            o = {key: rows} if y < 0.5 else rows if y < 0.75 else {"count": n, key: rows}
            if not rows:
                return self.dump(o), "Nothing was found.", []
            def row(d):
                vs = [str(y) for y in d.values()]
                return vs[0] + (f" ({', '.join(vs[1:])})" if len(vs) > 1 else "")
            lines = [row(d) for d in rows]
            facts = []
            if len(spec) > 1 and len({str(d[spec[0][0]]) for d in rows}) == n:
                for d in rows:
                    for k in list(d)[1:]:
                        facts.append((f"{human(k)} of {d[spec[0][0]]}", d[k]))
            return self.dump(o), "Here is what I found: " + (", ".join(lines[:-1]) + " and " + lines[-1] if n > 1 else lines[0]) + ".", facts
        d = {}
        for k, kind in spec:
            x = v.make(kind)[1]
            d[k] = {"true": True, "false": False}.get(x, x) if isinstance(x, str) else x
        y = r.random()
        o = d
        if y < 0.08:
            o = {"result": d}
        elif y < 0.16:
            o = {"data": d}
        elif y < 0.2:
            o = {"success": True, "data": d}
        elif y < 0.24 and len(d) > 1:
            ks = list(d)
            o = {ks[0]: d[ks[0]], v.word(): {k: d[k] for k in ks[1:]}}
        return self.dump(o), describe(d), [(human(k), x) for k, x in d.items()]

    def answer(self, tools_args, answers):
        """One sentence a result; results of one tool are told apart by the value that differs."""
        if len(answers) == 1:
            return answers[0]
        names = {t.name for t, _ in tools_args}
        if len(names) == 1:
            diff = [k for k in tools_args[0][1] if all(k in a for _, a in tools_args) and len({json.dumps(a.get(k)) for _, a in tools_args}) == len(tools_args)]
            if diff:
                return "\n".join(f"{render_plain(a[diff[0]])}: {x}" for (_, a), x in zip(tools_args, answers))
        return "\n".join(answers)

    # -- thoughts
    def thought(self, conv, calls=None, kind=None):
        if conv.mode == "disabled" or (conv.mode == "adaptive" and not calls):
            return ""
        if calls:
            out = []
            for n, a in calls:
                flat = all(not isinstance(x, (dict, list)) for x in a.values()) and len(render_value(a)) < 400
                out.append(n + (" with " + ", ".join(f"{k} = {render_plain(x)}" for k, x in a.items()) if a and flat else ""))
            return "I will call " + " and ".join(out) + "."
        return {"missing": "A required value is missing, so I ask for it.", "answer": "The result is here, so I answer.",
                "none": "None of the tools fits this request.", "chat": "No tool is needed.", "fact": "I know this from above."}[kind]

    def ai(self, conv, content="", calls=None, kind=None):
        conv.turns.append(("ai", self.thought(conv, calls, kind), content, calls or [], True))

    # -- episodes
    def round_trip(self, conv, uses, text):
        """user text, the calls, the results, the answer; gives the facts for follow-up questions"""
        conv.turns.append(("user", text))
        calls = [(t.name, a) for t, a in uses]
        self.ai(conv, calls=calls)
        res = [t.result(self, a) for t, a in uses]
        conv.turns.append(("tool", [x[0] for x in res]))
        self.ai(conv, self.answer(uses, [x[1] for x in res]), kind="answer")
        return res[0][2] if len(res) == 1 else []

    def ep_one(self, conv, tools):
        t = self.v.pick(tools)
        u = t.utter(self)
        if u is None:
            return None
        return self.round_trip(conv, [(t, u[1][0])], u[0])

    def ep_parallel(self, conv, tools):
        for _ in range(6):
            t = self.v.pick(tools)
            u = t.utter(self, many=self.v.pick((2, 2, 2, 3, 3, 4)))
            if u:
                return self.round_trip(conv, [(t, a) for a in u[1]], u[0])
        return self.ep_two(conv, tools)

    def ep_two(self, conv, tools):
        v, r = self.v, self.r
        a = v.pick(tools)
        b = a if r.random() < 0.2 else v.pick(tools)
        ua, ub = a.utter(self), b.utter(self)
        if not ua or not ub or (a is b and ua[1] == ub[1]) or (a is b and a.primary is None):
            return None
        sa, sb = ua[0].rstrip(".?"), ub[0].rstrip(".?")
        if sb[:1].isupper() and sb[1:2].islower() and sb.split(" ")[0].lower() not in ("i", "i'm"):
            sb = sb[0].lower() + sb[1:]
        j = v.pick((" and ", " and ", " and also ", ", and ", ", then ", ". Also ", "; ", ". And ", " and after that ", ", plus "))
        text = sa + j + sb + v.pick(("", ".", "?", ""))
        return self.round_trip(conv, [(a, ua[1][0]), (b, ub[1][0])], text)

    def ep_missing(self, conv, tools):
        v = self.v
        for _ in range(6):
            t = v.pick(tools)
            if not t.primary or t.primary.kind.split(":")[0] in ("bool", "obj"):
                continue
            u = t.utter(self, missing=True)
            if not u:
                continue
            args = dict(u[1][0])
            p = t.primary
            # other required values must be there, otherwise two would be missing
            if any(q.req and q is not p and q.name not in args for q in t.params):
                continue
            conv.turns.append(("user", u[0]))
            self.ai(conv, f"What is the {human(p.name)}?", kind="missing")
            s, x = v.make(p.kind)
            args[p.name] = x
            say = v.pick(("{}", "{}", "{}.", "{} please", "it's {}", "use {}", "The {h} is {}")).replace("{h}", human(p.name))
            conv.turns.append(("user", say.replace("{}", s)))
            calls = [(t.name, t.order(args))]
            self.ai(conv, calls=calls)
            res = t.result(self, args)
            conv.turns.append(("tool", [res[0]]))
            self.ai(conv, res[1], kind="answer")
            return res[2]
        return None

    def ep_chain(self, conv, tools):
        """A value of the first result is an argument of the second call."""
        v, r = self.v, self.r
        ps = [t for t in tools if isinstance(t, (Procedural, Everyday)) and t.primary and
              t.primary.kind.split(":")[0] in ("id", "email", "city", "person", "path", "url", "user", "title")]
        fs = [t for t in tools if isinstance(t, Procedural) and t.read]
        if not ps or not fs:
            return None
        b, a = v.pick(ps), v.pick(fs)
        if a is b:
            return None
        ua, ub = a.utter(self), b.utter(self, missing=True)
        if not ua or not ub:
            return None
        p = b.primary
        name = v.pick((p.name, p.kind.split(":")[0], v.word() + "_" + p.kind.split(":")[0]))
        value = v.make(p.kind)[1]
        h = human(name)
        sb = ub[0].rstrip(".?")
        if sb[:1].isupper():
            sb = sb[0].lower() + sb[1:]
        text = v.pick((f"{ua[0].rstrip('.?')}, then take the {h} from it and {sb}", f"{ua[0].rstrip('.?')} and with the {h} you get, {sb}",
                       f"First {ua[0][0].lower() + ua[0][1:].rstrip('.?')}. Then {sb} using its {h}"))
        conv.turns.append(("user", text))
        self.ai(conv, calls=[(a.name, ua[1][0])])
        o = {}
        extra = r.sample(W.FIELDS, v.pick((0, 1, 2)))
        pos = r.randrange(len(extra) + 1)
        for i, f in enumerate(extra + [None]):
            if i == pos:
                o[name] = value
            if f:
                k, kind = f.split(":", 1)
                if human(k) != h:
                    o[k] = v.make(kind)[1]
        conv.turns.append(("tool", [self.dump(o)]))
        args = b.order(dict(ub[1][0], **{p.name: value}))
        self.ai(conv, calls=[(b.name, args)])
        res = b.result(self, args)
        conv.turns.append(("tool", [res[0]]))
        self.ai(conv, res[1], kind="answer")
        return res[2]

    def ep_none(self, conv, tools):
        v, r = self.v, self.r
        keys = set().union(*[t.keys for t in tools]) if tools else set()
        doms = {k for k in keys if k.startswith("d:")}
        hand = any(isinstance(t, (Everyday, Snips)) for t in tools)
        for _ in range(10):
            x = r.random()
            text = None
            if x < 0.1 and self.oos:
                text = v.pick(self.oos)
                if hand or doms:
                    continue
            elif x < 0.3 and self.intents and not hand:
                desc, dom, lines = self.intents[v.pick(sorted(self.intents))]
                if "d:" + dom in doms or len(doms) > 2:
                    continue
                text = v.pick(lines)
            else:
                t = None
                if x < 0.36 and tools:            # the same noun with another action, or the same action elsewhere
                    o = v.pick(tools)
                    if isinstance(o, Procedural):
                        t = Procedural(self, noun=o.noun) if r.random() < 0.5 else Procedural(self, verb=o.verb)
                        if t.noun == o.noun and t.verb[1] == o.verb[1] and (t.verb[1] or t.verb[0] == o.verb[0]):
                            continue
                t = t or (Everyday(self, v.pick(self.hand)) if r.random() < 0.55 else Procedural(self))
                if t.keys & keys or (isinstance(t, Everyday) and doms):
                    continue
                if isinstance(t, Procedural) and any(getattr(o, "noun", 0) == t.noun and (o.read == t.read and t.read or o.verb[0] == t.verb[0]) for o in tools):
                    continue
                u = t.utter(self)
                if not u:
                    continue
                text = u[0]
            if text:
                conv.turns.append(("user", text))
                self.ai(conv, REFUSAL, kind="none")
                return []
        return None

    def ep_chat(self, conv, tools):
        v = self.v
        lines, answer = v.pick(W.CHAT).split(" => ")
        t = v.pick(lines.split("|"))
        t = v.pick((t, t.capitalize(), t.capitalize() + v.pick((".", "!")), t + v.pick(("!", ""))))
        if lines.startswith(("who", "what", "how", "are", "do ")):
            t = t.rstrip(".!") + v.pick(("?", "?", ""))
        conv.turns.append(("user", t))
        self.ai(conv, answer, kind="chat")
        return []

    def ep_repeat(self, conv, tools):
        v = self.v
        s = v.k_sentence() if self.r.random() < 0.5 else v.phrase(2, 8)
        conv.turns.append(("user", v.pick(("Repeat after me: {}", "Say exactly: {}", "repeat this: {}", "Echo: {}")).replace("{}", s)))
        self.ai(conv, s, kind="chat")
        return []

    def ep_follow(self, conv, facts):
        """A question on an earlier result."""
        v = self.v
        k, x = v.pick(facts)
        q = v.pick(("What was the {} again?", "what is the {}?", "And the {}?", "Remind me, what's the {}?", "tell me only the {}", "So what is the {}?", "the {}?", "Which {} did it say?"))
        conv.turns.append(("user", q.replace("{}", k)))
        self.ai(conv, f"The {k} is {render_plain(x)}.", kind="fact")
        return []

    def ep_another(self, conv, tools):
        """The same tool again with another value: "and in Bergen?" """
        last = [t for t in conv.turns if t[0] == "ai" and t[3]]
        if not last or len(last[-1][3]) != 1 or len(last[-1][3][0][1]) != 1:
            return None
        name, args = last[-1][3][0]
        t = next((t for t in tools if t.name == name), None)
        if not t or not t.primary or t.primary.name not in args or conv.turns[-1][0] != "ai" or conv.turns[-2][0] != "tool":
            return None
        if t.primary.kind.split(":")[0] in ("bool", "obj", "list", "enum"):
            return None
        s, x = self.v.make(t.primary.kind)
        q = self.v.pick(("And {}?", "what about {}?", "And what about {}?", "the same for {}", "now for {}", "How about {}?", "And for {} please", "do it for {} too"))
        return self.round_trip(conv, [(t, t.order({t.primary.name: x}))], q.replace("{}", s))

    # -- documents
    def system(self, conv):
        v, r = self.v, self.r
        x = r.random()
        if x < 0.35:
            return None
        s = v.fill(v.pick(W.SYSTEMS))
        if r.random() < 0.25:
            s += " " + v.fill(v.pick(W.SYSTEMS))
        facts = []
        if r.random() < 0.25:
            for _ in range(v.pick((1, 2, 3, 4))):
                k = v.pick(("wifi password", "office city", "support address", "door code", "project name", "manager", "opening time", v.word() + " code", v.word() + " contact", v.word() + " budget"))
                x = v.make({"office city": "city", "support address": "email", "manager": "person", "opening time": "clock"}.get(k, v.pick(("id", "word", "person"))))[1]
                if k not in [f[0] for f in facts]:
                    s += f"{v.pick((' ', chr(10)))}The {k} is {x}."
                    facts.append((k, x))
        if self.prose and r.random() < 0.04:
            s += "\n\n" + v.pick(self.prose)
        conv.facts = facts
        return s

    def new_conv(self):
        r, conv = self.r, Conv()
        conv.facts = []
        conv.system = self.system(conv)
        conv.mode = r.choices(("enabled", "adaptive", "disabled"), (36, 12, 52))[0]
        if r.random() < 0.25:
            conv.effort = self.v.pick(("low", "medium", "high", "xhigh", "max"))
        return conv

    def long_doc(self, conv):
        """A long text with facts in it, as a tool result or in the developer turn, and questions on the facts."""
        v, r = self.v, self.r
        target = v.pick((3000, 6000, 9000, 14000, 20000))       # characters
        facts, parts, size = [], [], 0
        row = r.random() < 0.5
        fields = [f.split(":", 1) for f in r.sample(W.FIELDS, 2)]
        seen = set()
        while size < target or not facts:
            if row:
                k = v.ident()
                if k in seen:
                    continue
                seen.add(k)
                o = {"id": k, **{n: v.make(kd)[1] for n, kd in fields}}
                s = json.dumps(o, ensure_ascii=False)
                for n, _ in fields:
                    if n != "id":
                        facts.append((f"{human(n)} of {k}", o[n]))
            else:
                if self.prose and r.random() < 0.5:
                    s = v.pick(self.prose)[:1500]
                else:
                    s = " ".join(v.k_sentence().capitalize() + "." for _ in range(6))
                if r.random() < 0.6:
                    k, x = f"{v.word()} {v.word()}", v.make(v.pick(("id", "person", "city", "word", "num:1:900")))[1]
                    if k not in seen:
                        seen.add(k)
                        s += f" The {k} is {x}."
                        facts.append((k, x))
            parts.append(s)
            size += len(s)
        body = ("[" + ", ".join(parts) + "]") if row else "\n\n".join(parts)
        if r.random() < 0.5:
            t = Everyday(self, next(d for d in EVERYDAY if d["group"] in ("fileread", "fetch") and r.random() < 0.6 or d["group"] == "logs"))
            tools = [t] + self.tool_set(v.pick((0, 1, 3)))
            tools = [x for i, x in enumerate(tools) if x.name not in [y.name for y in tools[:i]] and (i == 0 or not x.keys & t.keys)]
            conv.tools = [x.schema() for x in tools]
            u = t.utter(self)
            k, x = v.pick(facts)
            conv.turns.append(("user", u[0].rstrip(".?") + v.pick((" and tell me the ", ". What is the ", ". I need the ")) + k))
            self.ai(conv, calls=[(t.name, u[1][0])])
            conv.turns.append(("tool", [body]))
            self.ai(conv, f"The {k} is {render_plain(x)}.", kind="answer")
        else:
            conv.system = (conv.system or "You are a helpful assistant.") + "\n\n" + body
            tools = self.tool_set(v.pick((0, 0, 2, 5)))
            conv.tools = [t.schema() for t in tools]
        for _ in range(v.pick((2, 3, 4)) if facts else 0):
            self.ep_follow(conv, facts)
        return conv

    def conversation(self):
        v, r = self.v, self.r
        self.narrow()
        conv = self.new_conv()
        if r.random() < 0.035:
            return self.long_doc(conv)
        x = r.random()
        n = 0 if x < 0.05 else r.randrange(1, 8) if x < 0.72 else r.randrange(8, 25) if x < 0.985 else r.randrange(25, 50)
        tools = self.tool_set(n)
        r.shuffle(tools)
        conv.tools = [t.schema() for t in tools]
        facts = []
        for _ in range(v.pick((1, 1, 2, 2, 3, 3, 4, 5, 6))):
            for _ in range(6):
                x = r.random()
                if conv.facts and x < 0.3:
                    new = self.ep_follow(conv, conv.facts)
                elif x < 0.07 or not tools:
                    new = v.pick((self.ep_chat, self.ep_chat, self.ep_none, self.ep_repeat))(conv, tools)
                elif x < 0.09:
                    new = self.ep_repeat(conv, tools) if r.random() < 0.3 else self.ep_chat(conv, tools)
                elif x < 0.15 and facts:
                    new = self.ep_follow(conv, facts)
                elif x < 0.20:
                    new = self.ep_another(conv, tools)
                elif x < 0.29:
                    new = self.ep_none(conv, tools)
                elif x < 0.45:
                    new = self.ep_two(conv, tools)
                elif x < 0.59:
                    new = self.ep_parallel(conv, tools)
                elif x < 0.64:
                    new = self.ep_missing(conv, tools)
                elif x < 0.69:
                    new = self.ep_chain(conv, tools)
                else:
                    new = self.ep_one(conv, tools)
                if new is not None:
                    if new:
                        facts = new
                    break
        if not conv.turns:
            self.ep_chat(conv, tools)
        if conv.mode == "enabled" and r.random() < 0.08:      # a client that drops the reasoning of past turns
            last = max(i for i, t in enumerate(conv.turns) if t[0] == "ai")
            conv.turns = [t if t[0] != "ai" or i == last else ("ai", "", t[2], t[3], False) for i, t in enumerate(conv.turns)]
        return conv

    def document(self):
        """[(text, class)]"""
        if self.prose and self.r.random() < 0.03:
            return [("\n\n".join(self.v.pick(self.prose) for _ in range(self.v.pick((1, 2, 3, 5)))), 2)]
        return [(t, c) for t, c, _ in self.conversation().segments()]

    # -- evaluation
    def case(self, kind):
        """(case in OpenAI form, conversation, indices of the gold assistant turns)"""
        v, r = self.v, self.r
        while True:
            conv = self.new_conv()
            n = r.randrange(12, 21) if kind == "many" else r.randrange(1, 7)
            tools = self.tool_set(n)
            if kind == "many" and len(tools) < 12 or not tools:
                continue
            r.shuffle(tools)
            conv.tools = [t.schema() for t in tools]
            base = {"kind": kind, "tools": [{"type": "function", "function": t} for t in conv.tools], "thinking": conv.mode}
            head = [{"role": "system", "content": conv.system}] if conv.system is not None else []
            if conv.effort:
                base["effort"] = conv.effort
            if kind in ("one", "many", "answer"):
                if self.ep_one(conv, tools) is None:
                    continue
            elif kind == "two":
                if (self.ep_two if r.random() < 0.5 else self.ep_parallel)(conv, tools) is None or len(conv.turns[1][3]) != 2:
                    continue
            elif kind == "none":
                if self.ep_none(conv, tools) is None:
                    continue
            if kind == "session":
                facts, turns, gold = [], [], []
                ok = True
                for i in range(3):
                    at = len(conv.turns)
                    if i < 2:
                        new = (v.pick((self.ep_one, self.ep_one, self.ep_parallel)) if i == 0 else v.pick((self.ep_one, self.ep_another)))(conv, tools)
                        if new is None or "failed" in conv.turns[-1][2]:
                            ok = False
                            break
                        facts = new or facts
                        calls, results = conv.turns[at + 1][3], conv.turns[at + 2][1]
                        turns.append({"user": conv.turns[at][1], "expect": {"calls": [{"name": a, "arguments": b} for a, b in calls]},
                                      "tool_results": results, "answer": {"contains": contains(results)}})
                        gold += [at + 1, at + 3]
                    else:
                        new = self.ep_follow(conv, facts) if facts and r.random() < 0.7 else self.ep_chat(conv, tools)
                        k = conv.turns[-1][2]
                        e = {"contains": [k[k.index(" is ") + 4:-1]]} if conv.turns[-1][2].startswith("The ") else {"no_call": True}
                        turns.append({"user": conv.turns[at][1], "expect": e, "tool_results": []})
                        gold.append(at + 1)
                if not ok:
                    continue
                return dict(base, messages=head, turns=turns), conv, gold
            messages = head + [{"role": "user", "content": conv.turns[0][1]}]
            if kind == "none":
                return dict(base, messages=messages, expect={"no_call": True}), conv, [1]
            calls = conv.turns[1][3]
            if kind != "answer":
                return dict(base, messages=messages, expect={"calls": [{"name": a, "arguments": b} for a, b in calls]}), conv, [1]
            res = conv.turns[2][1][0]
            want = contains([res])
            if not want:
                continue
            m = {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": calls[0][0], "arguments": json.dumps(calls[0][1], ensure_ascii=False)}}]}
            if conv.turns[1][1]:
                m["reasoning_content"] = conv.turns[1][1]
            messages += [m, {"role": "tool", "tool_call_id": "call_1", "content": res}]
            return dict(base, messages=messages, expect={"contains": want}), conv, [3]


def contains(results):
    """The values that an answer to these results must hold."""
    out = []
    for t in results:
        try:
            o = json.loads(t)
        except ValueError:
            out.append(t)
            continue
        if not isinstance(o, (dict, list)):
            out.append(str(o))
            continue
        leaves = []

        def walk(x, key=None):
            if isinstance(x, dict):
                for k, y in x.items():
                    walk(y, k)
            elif isinstance(x, list):
                for y in x:
                    walk(y)
            elif key not in ("success", "count") and not (key == "status" and x == "error"):
                leaves.append(render_plain(x))
        walk(o)
        out += leaves
    return out


def render_plain(x):
    if isinstance(x, bool):
        return "true" if x else "false"
    if isinstance(x, (dict, list)):
        return json.dumps(x, ensure_ascii=False)
    return str(x)


def describe(d):
    parts = [f"the {human(k)} is {render_plain(x)}" for k, x in d.items()]
    s = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    return s[0].upper() + s[1:] + "."


KINDS = ("one", "two", "many", "answer", "none", "session")


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--eval", choices=KINDS)
    ap.add_argument("--count", type=int, default=10)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--show", action="store_true", help="print training conversations instead")
    ap.add_argument("--data")
    a = ap.parse_args()
    if a.show:
        g = Generator(a.seed, "train", a.data)
        for _ in range(a.count):
            print("".join(("\033[32m%s\033[0m" if c == 1 else "%s") % t for t, c in g.document()), "\n" + "=" * 80)
        return
    g = Generator(a.seed * 1000 + KINDS.index(a.eval), "held")
    for _ in range(a.count):
        print(json.dumps(g.case(a.eval)[0], ensure_ascii=False))


if __name__ == "__main__":
    main()
