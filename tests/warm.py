"""`python warm.py SOCKET` imports torch and the project once, then runs every command that comes over the socket in a process
forked from itself: the same code, in a process of its own with its caller's output, but without three seconds of imports.
`python warm.py SOCKET train.py ...` hands a command over and ends as it does."""
import json
import os
import socket
import struct
import sys


def serve(path):
    import runpy
    import signal
    from pathlib import Path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import matplotlib.backends.backend_agg  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import torch._dynamo  # noqa: F401  the first optimizer imports it

    import bench  # noqa: F401
    import table  # noqa: F401
    import train  # noqa: F401
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path + ".new")
    server.listen(64)
    os.rename(path + ".new", path)
    while True:
        client, _ = server.accept()
        if os.fork():               # a process that waits for the command and reports its end, so that many can run
            client.close()
            while True:
                try:
                    if os.waitpid(-1, os.WNOHANG)[0] == 0:
                        break
                except ChildProcessError:
                    break
            continue
        server.close()
        text, fds, _, _ = socket.recv_fds(client, 1 << 20, 2)
        job = json.loads(text)
        pid = os.fork()
        if pid == 0:
            os.dup2(fds[0], 1)
            os.dup2(fds[1], 2)
            os.chdir(job["cwd"])
            os.environ.clear()
            os.environ.update(job["env"])
            sys.argv = job["argv"]
            sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
            code = 1
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
                code = 0
            except SystemExit as e:
                code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
                if isinstance(e.code, str):
                    print(e.code, file=sys.stderr)
            except BaseException:
                import traceback
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        client.sendall(struct.pack("i", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        os._exit(0)


def hand_over(path, argv):
    if not argv[0].endswith(".py"):         # python -c
        os.execv(sys.executable, [sys.executable, *argv])
    s = socket.socket(socket.AF_UNIX)
    s.connect(path)
    socket.send_fds(s, [json.dumps(dict(argv=argv, cwd=os.getcwd(), env=dict(os.environ))).encode()], [1, 2])
    answer = s.recv(4)
    sys.exit(struct.unpack("i", answer)[0] if answer else 1)


if __name__ == "__main__":
    serve(sys.argv[1]) if len(sys.argv) == 2 else hand_over(sys.argv[1], sys.argv[2:])
