#!/bin/bash
cd /app
: > even.txt
: > odd.txt
while read -r number; do
    if [ $((number % 2)) = 0 ]; then echo "$number" >> even.txt; else echo "$number" >> odd.txt; fi
done < numbers.txt
