import os
import subprocess
import sys
import threading

from processes import Pid, descendants, is_gone


def test_a_number_that_is_used_again_is_not_the_process_that_had_it():
    held = threading.Event()
    thread = threading.Thread(target=held.wait)
    thread.start()
    try:
        assert not is_gone(os.getpid())
        assert is_gone(Pid(os.getpid(), started=0))
        assert is_gone(thread.native_id)
    finally:
        held.set()
        thread.join()


def test_processes_below_another_are_found_until_they_end():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        (found,) = [pid for pid in descendants(os.getpid()) if pid == child.pid]
        assert not is_gone(found)
        child.communicate(b"\n")
    assert is_gone(found)
