#!/bin/sh
# whimbrel-model from the outside: model_program.sh PROGRAM VECTORS
# Each line of `check` is a claim; the last line counts them.
program=$1
vectors=$2
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
passed=0
failed=0

check() {
    what=$1
    shift
    if "$@" >"$dir/out" 2>"$dir/err"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "[FAIL] $what"
        cat "$dir/out" "$dir/err"
    fi
}

# The program ends with this status, and says this on one of its outputs.
says() {
    want_status=$1
    want_text=$2
    shift 2
    "$program" "$@" </dev/null >"$dir/said" 2>&1
    status=$?
    cat "$dir/said"
    [ $status -eq "$want_status" ] && grep -qF -- "$want_text" "$dir/said"
}

same() {
    cmp "$dir/$1" "$dir/$2"
}

check "help" says 0 "generate DIR" --help
check "no command" says 2 "generate DIR"
check "unknown command" says 2 '"frob" is none of' frob
check "unknown option" says 2 "--frob" info --frob
check "verify of good checkpoints" says 0 "ok   draft values" verify --full "$vectors/tiny"
check "verify of shards" says 0 "72 text tensors as the shape demands" verify --full "$vectors/tiny-m3"
check "info" says 0 '"fingerprint":' info --json "$vectors/tiny"
check "info of a random shape" says 0 "8 with sparse attention" info random:nano
check "absent folder" says 2 "/nowhere/config.json" info /nowhere
check "random of an unknown shape" says 2 "none of tiny" random huge "$dir/x"
check "random of too large a shape" says 2 "GB of weights" random m3.1-flash "$dir/x"

check "export-gguf" says 0 "54 tensors, 539552 bytes" export-gguf "$vectors/tiny-m3" "$dir/m3.gguf"
check "export-gguf of all as floats" says 0 "bf16 0, f32 201992" export-gguf --exact "$vectors/tiny-m3" "$dir/m3.gguf"
check "export-gguf names what differs there" says 0 "the same up to 512 tokens" export-gguf "$vectors/../../config/models/nano" "$dir/nano.gguf"
check "export-gguf of what it cannot express" says 2 "shared experts of 32 beside experts of 64" export-gguf "$vectors/tiny" "$dir/x.gguf"
check "export-gguf into nowhere" says 2 "/nowhere/x.gguf: No such file" export-gguf "$vectors/tiny-m3" /nowhere/x.gguf
check "export-gguf of nothing" says 2 "/nowhere/config.json" export-gguf /nowhere "$dir/x.gguf"

check "random writes" "$program" random tiny "$dir/random" --seed 3
check "what random writes is verified" says 0 "ok   draft: 43 tensors" verify --full "$dir/random"
cp -r "$dir/random" "$dir/bad"
truncate -s -1 "$dir/bad/model.safetensors"
check "truncated" says 1 "truncated" verify "$dir/bad"
cp "$dir/random/model.safetensors" "$dir/bad/"
# A NaN in the last tensor's bytes: an E4M3 scale or a float, either is seen by --full only.
tail -c 64 "$dir/random/dspark/model.safetensors" >/dev/null
size=$(stat -c %s "$dir/bad/dspark/model.safetensors")
printf '\377\377\377\377' | dd of="$dir/bad/dspark/model.safetensors" bs=1 seek=$((size - 4)) conv=notrunc 2>/dev/null
check "a damaged value passes the quick look" says 0 "ok   draft" verify "$dir/bad"
check "and fails the full one" says 1 "FAIL draft values" verify --full "$dir/bad"
rm "$dir/bad/tokenizer.json"
check "absent tokenizer" says 1 "tokenizer.json" verify "$dir/bad"

"$program" tokens "$vectors/tiny" "Hello, wörld <tool_call>" >"$dir/ids"
"$program" tokens "$vectors/tiny" --decode <"$dir/ids" >"$dir/text"
printf 'Hello, wörld <tool_call>' >"$dir/want"
check "text to ids and back" same text want

seq 3 150 | tr '\n' ' ' >"$dir/prompt"
for draft in off 1 4 7 auto; do
    "$program" generate "$vectors/tiny" --ids "$dir/prompt" --max 80 --ignore-eos --draft $draft \
        >"$dir/greedy-$draft" 2>/dev/null
    "$program" generate "$vectors/tiny" --ids "$dir/prompt" --max 80 --ignore-eos --draft $draft --temperature 0.8 \
        --top-p 0.9 --seed 5 >"$dir/warm-$draft" 2>/dev/null
    check "drafted is plain, greedy, draft $draft" same greedy-off greedy-$draft
    check "drafted is plain, sampled, draft $draft" same warm-off warm-$draft
done
check "80 ids" test "$(wc -w <"$dir/greedy-off")" -eq 80
check "sampling is not greedy" sh -c "! cmp -s $dir/greedy-off $dir/warm-off"
for variant in avx2 ref; do
    "$program" generate "$vectors/tiny" --ids "$dir/prompt" --max 20 --ignore-eos --draft off --variant $variant \
        >"$dir/variant" 2>/dev/null || continue # this processor may lack it
    cut -d' ' -f1-20 "$dir/greedy-off" >"$dir/first"
    check "variant $variant" same variant first
done

cat >"$dir/chat.json" <<'JSON'
{"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": {"name": "f"}}],
 "thinking": "disabled"}
JSON
check "a conversation" says 0 '"prompt_tokens":' generate "$vectors/tiny" --chat "$dir/chat.json" --max 5 --json
echo '{"messages": [{"role": "nobody"}]}' >"$dir/chat.json"
check "a wrong role" says 2 "messages[0].role" generate "$vectors/tiny" --chat "$dir/chat.json"
echo '{"messages": [' >"$dir/chat.json"
check "cut JSON" says 2 "byte" generate "$vectors/tiny" --chat "$dir/chat.json"
check "two prompts" says 2 "exclude one another" generate "$vectors/tiny" --prompt a --ids "$dir/prompt"
check "too long" says 2 "fill the context of 128" generate "$vectors/tiny" --ids "$dir/prompt" --context 128
check "bad ids" says 2 "not a token id" generate "$vectors/tiny" --ids "$dir/chat.json"

echo "[====] Synthesis: Tested: $((passed + failed)) | Passing: $passed | Failing: $failed | Crashing: 0 "
[ $failed -eq 0 ]
