"""A template shares its loaded objects with its forks, and the behaviour of Python does not change."""

import subprocess
import sys

import pytest

from prorl_envs.sandbox.template.immortal_objects import possible

pytestmark = pytest.mark.skipif(not possible(), reason="this interpreter counts references differently")

#: Runs in its own process, since objects of the test process must not become immortal.
BEGIN = """
import ctypes, gc, os, sys, weakref
from pathlib import Path
from prorl_envs.sandbox.template.immortal_objects import make_immortal

class Thing:
    pass

def count(one):
    return ctypes.c_uint32.from_address(id(one)).value

things = [Thing() for _ in range(20_000)]
constant = (lambda: "a constant of some code")
"""


def run(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def test_loaded_objects_are_no_longer_counted() -> None:
    said = run("""
made = make_immortal()
loaded = [things[0], Thing, constant.__code__.co_consts[-1], sys.modules["gc"], things]
before = [count(one) for one in loaded]
more = [one for one in loaded for _ in range(1000)]
during = [count(one) for one in loaded]
del more
print(before == during == [count(one) for one in loaded] == [0xFFFFFFFF] * 5, made > 20_000)
""")
    assert said == "True True"


def test_later_objects_are_counted_and_freed_as_usual() -> None:
    said = run("""
make_immortal()
gc.freeze()
single, cycle = Thing(), Thing()
cycle.me = cycle
things.append(single)
deaths = [weakref.ref(single), weakref.ref(cycle)]
assert sys.getrefcount(single) == 3
things.pop()
del single, cycle
alone = deaths[0]() is None
gc.collect()
print(alone, deaths[1]() is None)
""")
    assert said == "True True"


def test_a_fork_that_reads_every_object_copies_no_memory() -> None:
    """The kernel counts the pages that a child writes to, and therefore copies."""
    touch = """
def copied():
    gc.freeze()
    reading, writing = os.pipe()
    if os.fork() == 0:
        def dirty():
            lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
            return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))
        before = dirty()
        keeping = list(things)
        os.write(writing, str(dirty() - before).encode())
        os._exit(0)
    os.wait()
    return int(os.read(reading, 100))
"""
    counted = int(run(touch + "print(copied())"))
    immortal = int(run(touch + "make_immortal()\nprint(copied())"))
    assert counted > 800, "20,000 objects of 48 bytes and more"
    assert immortal < counted / 2  # the list itself is 160 KB
