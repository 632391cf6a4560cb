"""Kills at chosen moments."""

# Runs a program that kills itself immediately before its Nth change of a file in output/.
KILLER = """
import os, runpy, signal, sys

left, program = int(sys.argv[1]), sys.argv[2]
del sys.argv[:2]
sys.path[0] = os.path.dirname(program)
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")

def count_down(event, arguments):
    global left
    is_written = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if (is_written or event in CHANGES) and "output/" in str(arguments[0]):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count_down)
runpy.run_path(program, run_name="__main__")
"""
