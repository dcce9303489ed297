#!/bin/bash
cd /app
declare -A sums
order=()
for receipt in receipts/*.txt; do
    while read -r product price; do
        [ -n "${sums[$product]}" ] || order+=("$product")
        sums[$product]=$((${sums[$product]:-0} + price))
    done < "$receipt"
done
for product in "${order[@]}"; do echo "$product ${sums[$product]}"; done > sums.txt
