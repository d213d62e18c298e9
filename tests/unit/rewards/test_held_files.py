"""What a program of a response holds of files, named or not, is counted: 64 MiB, by whatever way it keeps them."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mopd.config.rewards import CodeConfig
from mopd.rewards.graders.programs import MAX_FILE_BYTES, Sandbox
from tests.unit.rewards.items import item, judged

DEADLINE_S = 120.0
"""Of programs that would sleep for ever; none takes a second."""
HEAD = """\
import ctypes, fcntl, mmap, os, socket, struct, sys, tempfile, threading, time
libc, kept, MiB = ctypes.CDLL(None, use_errno=True), [], 2**20
def checked(result):
    if result < 0: raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def written(name, flags=os.O_RDWR | os.O_CREAT):
    fd = os.open(name, flags, 0o600)
    for _ in range(SIZE // MiB): os.write(fd, bytes(MiB))
    return fd
def removed(i):
    fd = written(f'f{i}'); os.unlink(f'f{i}'); return fd
def page(fd, **how):
    kept.append(mmap.mmap(fd, 4096, **how))
def paged(fd, protection=1, flags=1, length=4096):
    libc.mmap.restype = ctypes.c_void_p
    checked(-1 if libc.mmap(None, ctypes.c_size_t(length), protection, flags, fd, 0) in (None, 2**64 - 1) else 0)
    os.close(fd)
def reserve(command):
    fd = os.open('f', os.O_RDWR | os.O_CREAT)
    try: fcntl.ioctl(fd, command, struct.pack('=hhiqqiI16s', 0, 0, 0, 0, 2**30, 0, 0, b''))
    except OSError as error: assert error.errno == 1; raise  # and not as a file system refuses it that lacks it
def take(i):
    TAKE
def all_of_it():
    for i in range(640 * MiB // SIZE): take(i)
try:
    START
except OSError as error:
    print('refused:', error); sys.exit(0)
print('held'); sys.stdout.flush(); time.sleep(1000)
"""
START = {
    "in the main thread": "all_of_it()",
    "in another thread": """failed = []
    def work():
        try: all_of_it()
        except OSError as error: failed.append(error)
    thread = threading.Thread(target=work); thread.start(); thread.join()
    for error in failed: raise error""",
    "in another thread, and the main thread has ended": """def work():
        try: all_of_it()
        except OSError: pass
        time.sleep(1000)
    threading.Thread(target=work).start(); libc.syscall(60 if os.uname().machine == 'x86_64' else 93, 0)""",
}
HOLDING = {
    "files in the folder": "os.close(written(f'f{i}'))",
    "holes": "fd = os.open(f'f{i}', os.O_RDWR | os.O_CREAT); os.ftruncate(fd, SIZE); os.close(fd)",
    "removed": "kept.append(removed(i))",
    "a second name removed": "kept.append(written('a')); os.link('a', f'b{i}'); os.unlink('a'); os.unlink(f'b{i}')",
    "never named": "kept.append(written('.', os.O_RDWR | os.O_TMPFILE))",
    "only to be named": "fd = written('f'); kept.append(os.open('f', os.O_PATH)); os.unlink('f'); os.close(fd)",
    "above standard streams": "os.dup2(removed(i), 0) if i == 0 else kept.append(os.dup(removed(i)))",
    "one page mapped": "fd = removed(i); page(fd); os.close(fd)",
    "one page mapped, private": "paged(removed(i), flags=2)",
    "one page mapped, and no access": "paged(removed(i), protection=0, flags=2)",
    "mapped, then removed": "fd = written('f'); paged(fd); os.unlink('f')",
    "mapped without a name": "paged(written('.', os.O_RDWR | os.O_TMPFILE))",
    "hidden (not dumpable)": "checked(libc.prctl(4, 0, 0, 0, 0)); kept.append(removed(i))",
    "hidden, mapped": "checked(libc.prctl(4, 0, 0, 0, 0)); paged(removed(i))",
    "mapped, and controls in its name": r"n = 'a\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\nb'; fd = written(n); paged(fd)"
    "\n    os.unlink(n)",
    "names of one file": "os.close(written('a')) if i == 0 else None\n"
    "    for j in range(10): os.link('a', f'n{i} {j}')",
    "grown by its map": "fd = os.open('f', os.O_RDWR | os.O_CREAT); os.ftruncate(fd, SIZE); paged(fd, protection=3)\n"
    "    os.unlink('f')",
}
"""How to keep another SIZE bytes."""
REFUSED = {
    "a file in memory": "kept.append(os.memfd_create('x'))",
    "a secret file in memory": "checked(libc.syscall(447, 0))",
    "shared memory of POSIX": "checked(libc.shm_open(b'/x', os.O_RDWR | os.O_CREAT, 0o600))",
    "/dev/shm": "open('/dev/shm/x', 'w')",
    "/tmp": "open('/tmp/x', 'w')",
    "shared memory of System V": "checked(libc.shmget(0, SIZE, 0o1600))",
    "a message queue": "checked(libc.msgget(0, 0o1600))",
    "a message queue of POSIX": "checked(libc.mq_open(b'/x', os.O_RDWR | os.O_CREAT, 0o600, None))",
    "blocks beyond the end": "fd = os.open('f', os.O_RDWR | os.O_CREAT); checked(libc.fallocate(fd, 1, 0, "
    "ctypes.c_long(2**30)))",
    "blocks": "fd = os.open('f', os.O_RDWR | os.O_CREAT); checked(libc.fallocate(fd, 0, 0, ctypes.c_long(4096)))",
    "blocks beyond the end, by ioctl": "reserve(0x40305828)",
    "blocks beyond the end, by ioctl with 64 bits": "reserve(0x4030582A)",
    "descriptors on their way": "a, b = socket.socketpair(); kept.extend((a, b)); fd = removed(i)\n"
    "    socket.send_fds(a, [b'x'], [fd]); os.close(fd)",
    "messages on their way": "a, b = socket.socketpair(); a.sendmsg([b'x'])",
    "pages in a pipe, by splice": "r, w = os.pipe(); fd = removed(i); os.splice(fd, w, 4096, 0)",
    "pages in a pipe, by sendfile": "r, w = os.pipe(); fd = removed(i); os.sendfile(w, fd, 0, 4096)",
    "pages in a pipe, by tee": "r, w = os.pipe(); p, q = os.pipe(); os.write(w, b'x'); checked(libc.tee(r, q, 1, 0))",
    "memory in a pipe": "r, w = os.pipe(); b = ctypes.create_string_buffer(9); v = (ctypes.c_void_p * 2)("
    "ctypes.addressof(b), 9); checked(libc.vmsplice(w, v, 1, 0))",
    "a table of descriptors of its own": "checked(libc.unshare(0x400))",
    "a thread with a table of its own": "f = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 0)\n"
    "    s = ctypes.create_string_buffer(2**16); checked(libc.clone(f, ctypes.byref(s, 2**15), 0x10900, None))",
    "a process that shares it": "f = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 0)\n"
    "    s = ctypes.create_string_buffer(2**16); checked(libc.clone(f, ctypes.byref(s, 2**15), 0x400, None))",
    "a folder": "os.mkdir('d')",
    "a pipe of 64 MiB": "import fcntl; r, w = os.pipe(); fcntl.fcntl(w, 1031, 64 * MiB)",
    "a 65th descriptor": "kept.extend(os.open('/dev/null', os.O_RDONLY) for _ in range(64))",
    "a file of 17 MiB": "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    "    fd = os.open('f', os.O_RDWR | os.O_CREAT); os.ftruncate(fd, 17 * MiB)",
}
HONEST = {
    "a file": "open('a', 'w').write('x' * 9); assert open('a').read() == 'x' * 9; os.remove('a')",
    "48 MiB in files": "for i in range(3): os.close(written(f'f{i}'))",
    "many files, one after another": "for i in range(300):\n    open('a', 'w').write('x'); os.replace('a', 'b')",
    "removed ones that are closed": "for i in range(40): os.close(removed(i))",
    "48 MiB in removed files": "kept = [removed(i) for i in range(3)]",
    "temporary files": "t = tempfile\nfor make in (t.TemporaryFile, t.NamedTemporaryFile, t.SpooledTemporaryFile):\n"
    "    with make() as f: f.write(b'x'); f.seek(0); assert f.read() == b'x'",
    "a data base": "import sqlite3; c = sqlite3.connect('d'); c.execute('create table t (a)')\n"
    "c.execute('insert into t values (1)'); c.commit(); assert c.execute('select a from t').fetchall() == [(1,)]",
    "shared memory of its own": "kept = [mmap.mmap(-1, MiB) for _ in range(20)]",
    "a mapped file": "fd = written('f'); m = mmap.mmap(fd, SIZE); m[0] = 1; os.unlink('f'); assert m[0] == 1",
    "copies": "import shutil; os.close(written('a')); shutil.copyfile('a', 'b'); shutil.move('b', 'c')",
    "threads": "from concurrent.futures import ThreadPoolExecutor as E\n"
    "with E(8) as e: assert sum(e.map(int, '123')) == 6",
    "asyncio": "import asyncio\nasync def f(): await asyncio.sleep(0.01); return 3\nassert asyncio.run(f()) == 3",
    "a pair of sockets": "a, b = socket.socketpair(); a.sendall(b'x'); assert b.recv(1) == b'x'",
    "what Python asks of descriptors": "r, w = os.pipe(); os.set_blocking(r, False); os.set_inheritable(w, True)\n"
    "os.write(w, b'x'); assert struct.unpack('i', fcntl.ioctl(r, 0x541B, bytes(4))) == (1,)\n"
    "assert not sys.stdin.isatty() and not os.isatty(r)",
    "10 MiB of output": "for _ in range(10): print('x' * (MiB - 1))",
}


def run(folder: Path, source: str, *, size: int = MAX_FILE_BYTES) -> tuple[str, str]:
    """Why it counts for nothing, and what it printed."""
    text = source.replace("SIZE", str(size))
    (folder / "program.py").write_text(text)
    box = Sandbox(folder, 2**30, time.monotonic() + DEADLINE_S)
    running = box.start(["program.py"], stdin=b"")
    try:
        return running.wait(), running.read_output(running.output)
    finally:
        running.end()
        box.clear()
        assert list(folder.iterdir()) == []


TRIED = [
    *(("in the main thread", 16, way) for way in HOLDING),
    *(
        (start, 4, way)
        for start in (*START,)[1:]
        for way in ("files in the folder", "removed", "never named", "one page mapped", "hidden (not dumpable)")
    ),
]
"""Where it is kept, MiB of a piece, and how: files, descriptors, maps and who shows none of them are looked up."""


@pytest.mark.parametrize(("start", "size_mib", "way"), TRIED)
def test_nobody_holds_more_than_64_mib_of_files(way: str, start: str, size_mib: int, tmp_path: Path) -> None:
    source = HEAD.replace("TAKE", HOLDING[way]).replace("START", START[start])
    source = source.replace("; sys.exit(0)", "")  # at a limit of the system it goes on holding: looks take turns
    problem, said = run(tmp_path, source, size=size_mib * 2**20)
    assert problem == "it wrote too much", said


@pytest.mark.parametrize("way", REFUSED)
def test_what_nobody_could_count_is_refused(way: str, tmp_path: Path) -> None:
    problem, said = run(tmp_path, HEAD.replace("TAKE", REFUSED[way]).replace("START", "take(0)"))
    assert problem == "" and said.startswith("refused: "), (problem, said)


@pytest.mark.parametrize("what", HONEST)
def test_honest_programs_use_files_as_they_like(what: str, tmp_path: Path) -> None:
    problem, _ = run(tmp_path, HEAD.split("def take")[0] + HONEST[what])
    assert problem == ""


BODY = HEAD.split("def take")[0].replace("SIZE", str(MAX_FILE_BYTES))
CALLED = {
    "removed": "kept.extend(map(removed, range(40)))\n    time.sleep(1000)",
    "hidden": "libc.prctl(4, 0, 0, 0, 0); kept.extend(map(removed, range(40)))\n    time.sleep(1000)",
    "honest": "kept.extend(map(removed, range(3)))\n    return a + b",
}


def judge_calls() -> None:
    """Print the verdicts on functions that hold files."""
    texts = (f"```python\n{BODY}\ndef add(a, b):\n    {text}\n```" for text in CALLED.values())
    items = [item(text, ["assert add(1, 2) == 3"]) for text in texts]
    found = judged(CodeConfig(type="code", timeout_s=DEADLINE_S), *items)
    print(json.dumps([(graded.value, graded.problem) for graded in found]))


def drop_capabilities() -> None:
    """What root executes then has none, and sees no more of other processes than any user of its own."""
    for number in range(64):
        ctypes.CDLL(None).prctl(24, number, 0, 0, 0)


@pytest.mark.parametrize("prepare", [None, drop_capabilities])
def test_what_the_tests_call_is_counted_too(prepare: Callable[[], None] | None) -> None:
    """The program has a process of its own beside the tests', which are waited for; also where nobody is root."""
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import judge_calls; judge_calls()"],
        cwd=Path(__file__).parents[3], preexec_fn=prepare, capture_output=True, text=True, timeout=4 * DEADLINE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    full = [0.0, "the tests did not end: it wrote too much"]
    assert json.loads(done.stdout) == [full, full, [1.0, ""]]


def test_several_programs_of_a_response_share_the_limit(tmp_path: Path) -> None:
    half = BODY.replace("f'f{i}'", "f'{os.getpid()} {i}'") + "kept = [removed(i) for i in range(3)]\n"
    (tmp_path / "program.py").write_text(half + "print('held'); sys.stdout.flush(); time.sleep(1000)")
    box = Sandbox(tmp_path, 2**30, time.monotonic() + DEADLINE_S)
    one, other = box.start(["program.py"]), box.start(["program.py"])
    try:
        assert one.wait() == "it wrote too much"
    finally:
        one.end()
        other.end()


AS_ANY_USER = """
import ctypes, os, sys
from pathlib import Path
from mopd.rewards.graders.programs import HIDDEN, _removed_files
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
def ended(): os._exit(0)
def shown(): read.read(1)
for work, dumpable, held in ((ended, 1, {}), (shown, 1, {}), (shown, 0, HIDDEN)):
    ctypes.CDLL(None).prctl(4, dumpable, 0, 0, 0)
    reading, writing = os.pipe()
    read = os.fdopen(reading, "rb")
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        work()
        os._exit(0)
    if work is ended:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    found = _removed_files(pid, Path("/nowhere"))
    os.close(writing)
    os.waitpid(pid, 0)
    assert found == held, (work, dumpable, found)
"""


def test_who_is_not_root_tells_an_ended_program_from_one_that_hides() -> None:
    """The descriptors of an ended process are root's alone to see: every honest program "wrote too much" for anybody
    else."""
    done = subprocess.run(
        [sys.executable, "-c", AS_ANY_USER], cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
