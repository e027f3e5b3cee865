#!/bin/sh
# Write .env from .env.example with new secrets, and make the folder data. In an existing .env, fill in secrets that
# are empty or missing, and change nothing else.
set -eu
cd "$(dirname "$0")/.."
# If the engine made the folder, it would be root's; containers read it as uid 10001.
[ -d data ] || { mkdir data && chmod 755 data; }
umask 077
from=.env.example
[ ! -e .env ] || from=.env
new=$(mktemp .env.XXXXXX)
trap 'rm -f "$new"' EXIT
filled=''

fill() {  # the line NAME= with a secret
  filled="$filled ${1%=}"
  printf '%s%s\n' "$1" "$(od -An -tx1 -N24 /dev/urandom | tr -d ' \n')" >> "$new"
}

while IFS= read -r line || [ -n "$line" ]; do
  case $line in
    '#'*) printf '%s\n' "$line" >> "$new" ;;
    *PASSWORD=|*TOKEN=)
      if grep -qx "$line" .env.example; then fill "$line"; else printf '%s\n' "$line" >> "$new"; fi ;;
    *) printf '%s\n' "$line" >> "$new" ;;
  esac
done < "$from"
while IFS= read -r line; do
  case $line in
    '#'*) ;;
    *PASSWORD=|*TOKEN=) grep -q "^$line" "$new" || fill "$line" ;;
  esac
done < .env.example
if [ -z "$filled" ]; then
  echo ".env is there already, with all secrets: left as it is"
  exit 0
fi
mv "$new" .env
echo ".env: new secrets in$filled; readable by you alone"
