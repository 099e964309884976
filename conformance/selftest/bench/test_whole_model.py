"""What the programs that measure whole models have in common."""

import os
import subprocess
import sys
from pathlib import Path

from paths import ROOT

PARENT = """
import signal, sys
from argparse import Namespace
from whole_model import children
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what runs in the background
program = sys.argv.pop(1)
print(children(program, Namespace(threads=[1, 2])))
"""
CHILD = """
import argparse, os, signal, time
from whole_model import give, shared
parser = argparse.ArgumentParser()
shared(parser)
options = parser.parse_args()
give({"threads": options.child, "parts": 1}, options)
give({"threads": options.child, "parts": 2}, options)
if options.child == 2:
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(100)
"""


def test_an_interrupt_keeps_what_was_given(tmp_path: Path) -> None:
    """The parts that were finished count, those of the interrupted process too, which ends at once."""
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "child.py").write_text(CHILD)
    paths = os.pathsep.join([str(ROOT / "bench"), *sys.path])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "parent.py"), str(tmp_path / "child.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.stdout.strip() == str(([{"threads": 1, "parts": 2}, {"threads": 2, "parts": 2}], True))
    assert done.stderr.splitlines()[-1] == "interrupted: what is finished is kept"
