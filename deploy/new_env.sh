#!/bin/sh
# Write .env from .env.example, with new secrets. A .env that is there stays as it is.
set -eu
cd "$(dirname "$0")/.."
if [ -e .env ]; then
  echo ".env is there already: left as it is"
  exit 0
fi
umask 077
while IFS= read -r line; do
  case $line in
    *PASSWORD=|*TOKEN=) line="$line$(od -An -tx1 -N24 /dev/urandom | tr -d ' \n')" ;;
  esac
  printf '%s\n' "$line"
done < .env.example > .env
echo ".env written, readable by you alone"
