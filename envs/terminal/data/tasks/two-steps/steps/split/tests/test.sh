#!/bin/bash
if [ "$(cat /app/even.txt)" = $'4\n6\n8\n2' ] && [ "$(cat /app/odd.txt)" = $'9\n1\n3\n7\n5' ]; then
    echo 1
else
    echo 0
fi > /logs/verifier/reward.txt
