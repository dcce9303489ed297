#!/bin/bash
printf '%s\n' 1 2 3 4 5 6 7 8 9 10 11 > /tmp/expected
if [ "$(cat /app/all.txt)" = "$(cat /tmp/expected)" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
