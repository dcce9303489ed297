"""Fuzzing of all parsers of data from sandboxes, models and untrusted files: see `fuzz.targets`.

python -m fuzz                               # each target for 30 s; needs the extra `fuzz`
python -m fuzz --seconds 300 frames reports  # some of them for longer
"""
