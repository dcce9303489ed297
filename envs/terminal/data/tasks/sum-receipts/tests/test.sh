#!/bin/bash
expected="rice 260
milk 290
apples 308
bread 320
tea 499"
if [ "$(cat /app/sums.txt)" = "$expected" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
