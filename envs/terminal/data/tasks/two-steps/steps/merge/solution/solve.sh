#!/bin/bash
cd /app
seen=()
for number in $(cat even.txt odd.txt late.txt); do seen[number]=1; done
printf '%s\n' "${!seen[@]}" > all.txt
