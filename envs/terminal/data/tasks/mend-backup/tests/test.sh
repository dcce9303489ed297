#!/bin/bash
# The share of the cases that work.
mkdir -p /tmp/a/folder
cd /tmp/a
echo one > plain
echo two > "with space"
echo three > ./-dash
: > empty
echo four > folder/inner
/bin/bash /app/backup.sh /tmp/a /tmp/new/b
passed=0
holds() { if [ "$(cat -- "$1")" = "$2" ]; then passed=$((passed + 1)); fi; }
holds /tmp/new/b/plain.bak one
holds "/tmp/new/b/with space.bak" two
holds /tmp/new/b/-dash.bak three
if [ -d /tmp/new/b ] && [ ! -e /tmp/new/b/empty.bak ] && [ ! -e /tmp/new/b/folder.bak ]; then passed=$((passed + 1)); fi
case $passed in 4) echo 1 ;; *) echo "0.$((passed * 25))" ;; esac > /logs/verifier/reward.txt
