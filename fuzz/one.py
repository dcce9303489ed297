"""One target under atheris: `python -m fuzz.one TARGET [options and folders of libFuzzer]`."""

import sys

import atheris

with atheris.instrument_imports(include=["prorl_envs", "tarfile", "fuzz.targets"]):
    from fuzz.targets import run


def main() -> None:
    name, *options = sys.argv[1:]
    atheris.Setup([sys.argv[0], *options], lambda data: run(name, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
