# `helm test`: the text of every strategy must be that of plain decoding.
# PROMPT, MAX_TOKENS and where the orchestrator is come from the environment.

until paceline health; do
  sleep 2
done
paceline info

generate() {
  paceline generate "$PROMPT" --max-tokens "$MAX_TOKENS" --ignore-eos --temperature 0 --strategy "$1"
}

plain=$(generate non-si)
if [ -z "$plain" ]; then
  echo "plain decoding gave no text" >&2
  exit 1
fi
for strategy in si dsi auto; do
  text=$(generate "$strategy")
  if [ "$text" != "$plain" ]; then
    echo "$strategy differs from plain decoding; in 16 bits rounding can decide a near-tie differently:" >&2
    printf 'plain: %s\n%s: %s\n' "$plain" "$strategy" "$text" >&2
    exit 1
  fi
  echo "$strategy: identical to plain decoding"
done
