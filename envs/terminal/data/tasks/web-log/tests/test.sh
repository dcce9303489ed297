#!/bin/bash
# Isolated: nothing that the agent left in the working directory or in variables is imported.
python3 -I /tests/check.py
