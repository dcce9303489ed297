#!/bin/bash
cd /app/notes
if [ "$(git log --format=%s main)" = $'third\nsecond\nfirst' ] \
    && [ "$(git show main:notes.txt)" = $'first\nsecond\nthird' ] \
    && [ -z "$(git status --porcelain)" ]; then
    echo 1
else
    echo 0
fi > /logs/verifier/reward.txt
