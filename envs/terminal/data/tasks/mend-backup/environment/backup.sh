#!/bin/bash
cd $1
for f in $(ls); do
    cat $f > $2/$f.bak
done
