"""A `python` that hands Ray's workers to a fork server: a program, run by path, isolated.

    python -IS fork_client.py ADDRESS-OF-THE-SERVER ARGUMENTS-OF-PYTHON...

It stands for its fork: Ray starts it and watches it, it passes signals on, and ends as the fork has
ended. Everything else that Ray starts becomes a plain Python of the same arguments, and so does a
worker where no server answers.
"""

import array
import contextlib
import json
import os
import resource
import signal
import socket
import sys

_WORKER = os.path.join("ray", "_private", "workers", "default_worker.py")
# The server may still be importing. `cluster` has Ray give a worker 600 s, of which a plain one
# needs some.
_ANSWER_LIMIT_S = 300.0
_PASSED_ON = (signal.SIGINT, signal.SIGTERM)
_MAY_BE_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STANDARD_FILES = [0, 1, 2]


def main() -> None:
    """Have the program forked, and end as it ends; or become it."""
    address, *arguments = sys.argv[1:]
    if not (arguments and arguments[0].endswith(_WORKER)):
        _run_plainly(arguments)
    # One that arrives before it can be passed on waits until then.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    server = socket.socket(socket.AF_UNIX)
    server.settimeout(_ANSWER_LIMIT_S)
    try:
        server.connect(address)
        _ask(server, arguments, blocked=[int(each) for each in blocked])
        forked = _number(server.recv(4))
    except OSError as error:
        forked = 0
        # Ray shows it to the driver's user.
        sys.stderr.write(
            f"a worker starts as a plain process, as its fork server does not answer ({error}); "
            "cluster.fork_workers=false starts all of them so\n"
        )
    if not forked:
        server.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        _run_plainly(arguments)

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # its status is on the way
            os.kill(forked, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    # As long as the worker lives; the server's own end is seen here too.
    server.settimeout(None)
    _end_as(server.recv(4))


def _run_plainly(arguments: list[str]) -> None:
    os.execv(sys.executable, [sys.executable, *arguments])


def _ask(server: socket.socket, arguments: list[str], *, blocked: list[int]) -> None:
    umask = os.umask(0o77)
    os.umask(umask)
    is_ignored = {each: signal.getsignal(each) == signal.SIG_IGN for each in _MAY_BE_IGNORED}
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "umask": umask,
        "niceness": os.nice(0),
        "ignored": [int(each) for each in _MAY_BE_IGNORED if is_ignored[each]],
        "blocked": blocked,
    }
    encoded = json.dumps(request).encode()
    files = array.array("i", _STANDARD_FILES)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)]
    server.sendmsg([len(encoded).to_bytes(4, "big")], rights)
    server.sendall(encoded)


def _number(received: bytes) -> int:
    return int.from_bytes(received, "big", signed=True) if len(received) == 4 else 0


def _end_as(received: bytes) -> None:
    """End with the exit status, or by the signal, that the server reports of the fork."""
    if len(received) < 4:
        # The server has ended, and its forks with it.
        os._exit(1)
    status = _number(received)
    if status < 0:
        # The fork has left the core dump that there is to leave.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
