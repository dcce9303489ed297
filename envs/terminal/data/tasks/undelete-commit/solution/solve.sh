#!/bin/bash
cd /app/notes
git reset --hard "HEAD@{1}"
