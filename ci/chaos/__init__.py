"""Chaos: faults are injected into a running server under mixed load, and every stream is compared with what it gets
alone.

    make chaos                                  10 minutes, two ranks
    make chaos ARGS="--minutes 30 --seed 7"     the same faults in the same order, for longer

`faults/` says what can happen and what is promised then, `workload.py` what is asked; the other files are the run:
the machine's private corner (`sandbox.py`), the server (`scene.py`), its clients (`load.py`, `doors.py`), who injects
(`actor.py`), who judges (`oracle.py`, `leaks.py`) and who tells (`table.py`).
"""
