#!/bin/bash
# 1 if the file holds the text; white space at its end does not count.
if [ "$(cat /app/hello.txt)" = hello ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
