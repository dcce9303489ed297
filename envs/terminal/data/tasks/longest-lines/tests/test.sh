#!/bin/bash
expected="and someone counts the stairs
of all who lived there once
and someone says the names"
if [ "$(cat /app/longest.txt)" = "$expected" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
