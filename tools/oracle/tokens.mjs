// Token vectors by the reference implementation of tokenizer.json (Rust, through the npm package @anush008/tokenizers).
//   npm install --no-save @anush008/tokenizers@0.6.0
//   node tools/oracle/tokens.mjs MODEL_FOLDER tests/vectors/chat.json OUT.json
// "plain" is encoded with the added tokens taken out of the file, so spelled specials stay text; "special" (the rendered
// conversations of chat.json) with them in.
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { createRequire } from "node:module";

const { Tokenizer } = createRequire(path.join(process.cwd(), "x.js"))("@anush008/tokenizers");
const [folder, chats, out] = process.argv.slice(2);

const plain = [
  "", " ", "  ", "a", "Hello", "Hello, world!", " leading", "trailing ", "two  spaces", "   three   ", "\n", "\n\n", "\r\n",
  "a\n", "a \n b", "a\n\n\n  b\n", "\t\tx\ty", " \n \n ", "line one\r\nline two\r\n\r\nend", "x   \n", "x\n   ", "\u00a0nbsp\u00a0",
  "\u2003em\u3000ideographic", "I'm you're he's we've they'll I'd don't", "I'M YOU'RE HE'S WE'VE THEY'LL I'D", "'s 't 're", "it’s",
  "rock'n'roll 'quoted'", "camelCase PascalCase HTTPServer XMLHttpRequest iPhone", "snake_case kebab-case a.b.c a/b/c",
  "0 1 12 123 1234 12345 1234567890", "3.14159 1e-9 0x1F 1,000,000", "2026-12-02T03:33:09Z", "192.168.0.1:8080",
  "a1b2c3 x86_64 v1.2.3-rc4", "!@#$%^&*()_+-=[]{}|;':\",./<>?`~", "!!! ... ??? --- ===", "foo(bar, baz[0]) -> {x: 1}",
  "if (a<b&&c>d) { return a?b:c; } // note", "#include <stdio.h>\nint main(void)\n{\n    return 0;\n}\n",
  "def f(x):\n\treturn x**2  # power\n", "SELECT * FROM t WHERE a = 'b''c' AND d <> 1;", "<div class=\"x\">&amp;</div>",
  "{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Oslo\", \"days\": 2, \"ok\": true, \"x\": null}}",
  "https://example.org/a%20b?c=d&e=f#g", "ann.o'neil+tag@x-y.example.no", "~/src/../kernels/gemm.c", "C:\\Users\\me\\a.txt",
  "naïve café Ærøskøbing ÀÉÎÕÜ straße ŒUVRE", "e\u0301 decomposed E\u0301COLE n\u0303", "ΑΒΓ αβγ Ὀδυσσεύς", "Привет, МИР! ёж",
  "日本語の文章。漢字かなカナ", "中文，标点。数字１２３", "한국어 문장입니다 비빔밥", "שלום עולם", "مرحبا بالعالم ١٢٣", "हिन्दी में लिखा है", "ภาษาไทย",
  "🙂🙂 👩‍👩‍👧‍👦 🇳🇴 ❤️", "☂ ½ ² ⅷ Ⅷ ٣ ൩ 〇", "ǅ ǈ titlecase ʰ modifier ª º", "a\u200bzero\u200dwidth\ufeffbom", "\u0000\u0001\u007f\u0085control",
  "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚 𐍈 𠀀", "ﬁ ﬂ ligature ẞ İ ı ſ", "…—–‘’“”«»„", "© ® ™ € £ ¥ § ¶", "→ ⇒ ≤ ≠ ∑ √", "a\u0300\u0301\u0302b \u0301alone",
  "]~b]user\n[e~[", "]<]minimax[>[<tool_call>", "<mm:think></mm:think>", "</tool_call> ]~!b[ ]!p~[", "x]~b]y", "]<]minimax[>", "<think>",
  "Current thinking mode: disabled. Do not output any thinking process.\n",
  "The quick brown fox jumps over the lazy dog. Pack my box with five dozen liquor jugs!",
  "What's the weather like in Ouagadougou today, and can you remind me at 18:45 to call Zoë?",
  "Z".repeat(300), ".".repeat(300), " ".repeat(300), "\n".repeat(300), "_".repeat(200), "字".repeat(100), "e\u0301".repeat(100),
  "ab ".repeat(100), "0".repeat(200), "aA".repeat(150), " \n".repeat(100), "\t".repeat(64) + "x", "a".repeat(64) + "1".repeat(64) + "!".repeat(64),
  "=".repeat(80) + "\n" + "-".repeat(80) + "\n",
];

const file = path.join(folder, "tokenizer.json");
const whole = Tokenizer.fromFile(file);
const bare = JSON.parse(fs.readFileSync(file, "utf8"));
bare.added_tokens = [];
const copy = path.join(fs.mkdtempSync(path.join(os.tmpdir(), "tokens-")), "tokenizer.json");
fs.writeFileSync(copy, JSON.stringify(bare));
const without = Tokenizer.fromFile(copy);

async function ids(tokenizer, text) {
  return Array.from((await tokenizer.encode(text, null, { addSpecialTokens: false })).getIds());
}

const rows = { plain: [], special: [] };
for (const text of plain) rows.plain.push({ text, ids: await ids(without, text) });
// A conversation whose content spells a special token has no rendered text that means what it says: left out.
const cases = JSON.parse(fs.readFileSync(chats, "utf8")).cases.filter((c) => !c.name.includes("special tokens"));
const few = cases.filter((_, i) => i === 0 || i >= 13 && i < 20 || i >= cases.length - 3);
for (const c of few) rows.special.push({ case: c.name, ids: await ids(whole, c.text) });

const lines = (list) => list.map((r) => JSON.stringify(r)).join(",\n");
fs.writeFileSync(out, `{"plain": [\n${lines(rows.plain)}\n],\n"special": [\n${lines(rows.special)}\n]}\n`);
