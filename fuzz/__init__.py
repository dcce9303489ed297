"""Fuzzing of everything that parses what a sandbox, a model or a stranger's file says: see `fuzz.targets`.

python -m fuzz                               # each target for 30 s; needs the extra `fuzz`
python -m fuzz --seconds 300 frames reports  # some of them for longer
"""
