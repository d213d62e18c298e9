"""Grader of the ``code`` reward: runs the last fenced program of a response against the tests of its row.

The verdict never comes from the program's own process: its output is compared here, and the results of its functions in
the process of the tests (``calls.py``).

A program is confined by limits, Landlock and a system call filter. It has one process and no second one: it starts none
(``fork`` is refused; threads are not), signals none but itself, opens no socket, and has no capability. If the kernel
has Landlock (Linux 5.13 and newer) it reads its Python and the system's libraries only, and writes plain files in its
own folder; on older kernels it reads what its user can and writes nothing. All of this is set between ``fork`` and
``exec`` and cannot be undone. The files that it holds are in its folder, or shown by ``/proc`` as descriptors or
mappings of the process: it cannot have a second table of descriptors, nor leave descriptors or pages in pipes and
sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import cache, partial
from pathlib import Path
from typing import Any

from mopd.rewards.graders.system_calls import DENIED, FIRST_NEW, NEW_ALLOWED, WRITING, Architecture, architecture_named

CALLS = str(Path(__file__).with_name("calls.py"))
FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+.-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.M | re.S)
LANGUAGES = ("", "python", "python3", "py")
MAX_VERDICT = 4096
Judged = tuple[float, "str | None", str]
"""Value, the extracted text, and why the value is 0."""


def last_block(response: str, languages: tuple[str, ...]) -> str | None:
    """Return the last fenced block in one of these languages."""
    blocks = [text for language, text in FENCE.findall(response) if language.lower() in languages]
    return blocks[-1] if blocks else None


def grade_program(call: dict[str, Any], *, timeout_s: float, max_bytes: int) -> Judged:
    """Return value 1 if the program passes all tests in time. ``tests`` as from
    ``mopd.rewards.ground_truths.tests_of``."""
    program = last_block(call["response"], LANGUAGES)
    if program is None:
        return 0.0, None, "the response has no finished block between ``` lines"
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(dir=".") as folder:
        sandbox = Sandbox(Path(folder).resolve(), max_bytes, deadline, may_read=(CALLS,))
        tests = call["tests"]
        try:
            problem = (
                _runs(sandbox, program, tests["cases"]) if tests["kind"] == "stdin" else _calls(sandbox, program, tests)
            )
        finally:
            sandbox.clear()
    return float(not problem), program, problem


def _runs(sandbox: Sandbox, program: str, cases: list[list[str]]) -> str:
    """Run the whole program once per case: input to stdin, output to compare."""
    for number, (given, expected) in enumerate(cases):
        sandbox.clear()
        (sandbox.folder / "program.py").write_text(program, encoding="utf-8", errors="surrogatepass")
        running = sandbox.start(["program.py"], stdin=given.encode("utf-8", "surrogatepass"))
        try:
            problem = running.wait()
            if problem:
                return f"case {number}: {problem}"
            if not same_output(running.read_output(running.output), expected):
                return f"case {number}: another output than the expected one"
        finally:
            running.end()
    return ""


def _calls(sandbox: Sandbox, program: str, tests: dict[str, Any]) -> str:
    """Run program and tests in a process each, with a pipe between them in each direction."""
    to_program, from_tests = os.pipe()
    to_tests, from_program = os.pipe()
    verdict, verdict_end = os.pipe()
    asked = json.dumps({**tests, "program": program}).encode()
    running = []
    try:
        running.append(
            sandbox.start([CALLS, "program", str(to_program), str(from_program)], pass_fds=(to_program, from_program))
        )
        ends = (to_tests, from_tests, verdict_end)
        running.append(sandbox.start([CALLS, "tests", *map(str, ends)], stdin=asked, pass_fds=ends, is_ours=True))
        for descriptor in (to_program, from_program, *ends):
            os.close(descriptor)
        problem = running[1].wait()
        if problem:
            return f"the tests did not end: {problem}"
        outcome = json.loads(os.read(verdict, MAX_VERDICT) or '{"problem": "the tests gave no verdict"}')
        if outcome["problem"].startswith("the program has ended"):
            return f"{outcome['problem']}: {running[0].wait()}"
        return "" if outcome.get("passed") is True else str(outcome["problem"])
    finally:
        os.close(verdict)
        for process in running:
            process.end()


def same_output(output: str, expected: str) -> bool:
    """Compare line by line without surrounding white space; lines that differ as lists of numbers (LiveCodeBench)."""
    lines, expected_lines = ([line.strip() for line in text.strip().split("\n")] for text in (output, expected))
    return len(lines) == len(expected_lines) and all(map(_same_line, lines, expected_lines))


def _same_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    try:
        return [Decimal(word) for word in line.split()] == [Decimal(word) for word in expected.split()]
    except InvalidOperation:
        return False


MAX_FILE_BYTES = 16 * 2**20
"""Largest size of one file, of the output, and of what is written to stderr."""
MAX_HELD_BYTES, MAX_FOLDER_FILES = 64 * 2**20, 200
"""Bytes of files in the folder and of removed ones that a program holds, together; names of files in the folder."""
HIDDEN = {0: MAX_HELD_BYTES + 1}
"""What a program is taken to hold that does not show it."""
MAX_GLANCES = 100
"""At the threads of a program before it counts as hiding: one that ends makes no new ones, so that two or three do."""
MAX_OPEN_FILES = 64
LOOK_EVERY_S = 0.02
ENVIRONMENT = {"PATH": os.defpath, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Environment of programs. One thread: numpy's pools, one per core, need more memory than a program may have."""

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
CAPABILITY_VERSION = 0x20080522
FILE_READ, FILE_WRITE, FILE_EXECUTE = 1 << 2, 1 << 1 | 1 << 14, 1 << 0
FOLDER_READ = 1 << 3
PLAIN_FILES = 1 << 5 | 1 << 8
"""Landlock rights to make and remove plain files: no folder, link, socket or device."""
THREAD_FLAGS = (0x3D0F00, 0x7D0F00)
"""clone(2) of pthread_create, of glibc and of musl. Another thread could have descriptors that /proc/PID/fd does not
show."""
SIGNAL_OWNERS = (8, 10, 15)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX: the kernel would signal another process in our name."""
DEVICE_CALLS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: what Python asks of a descriptor. Among the others
some give a file blocks beyond its end (FS_IOC_RESVSP), share blocks, or have processes signalled (FIOSETOWN)."""
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Program:
    """A running process, its output and its deadline."""

    process: subprocess.Popen[bytes]
    output: int
    """Descriptor of the file that receives its stdout; ``errors``: that of its stderr."""
    errors: int
    sandbox: Sandbox
    _closed: bool = field(default=False, init=False)

    def wait(self) -> str:
        """Wait for its end; return an empty text for exit code 0, else why it counts for nothing."""
        handle = os.pidfd_open(self.process.pid)
        try:
            while True:
                left_s = self.sandbox.deadline - time.monotonic()
                if left_s <= 0:
                    return "it took too long"
                has_ended = _readable(handle, min(left_s, LOOK_EVERY_S))
                if self.sandbox.is_full():
                    return "it wrote too much"
                if has_ended:
                    break
        finally:
            os.close(handle)
        code = self.process.wait()
        if code < 0:
            return f"it was ended by {signal.Signals(-code).name}"
        lines = [line for line in self.read_output(self.errors).splitlines() if line.strip()]
        return "" if code == 0 else f"exit code {code}: {lines[-1][:200] if lines else 'it wrote nothing to stderr'}"

    def read_output(self, descriptor: int) -> str:
        """Return what it wrote to ``output`` or ``errors``."""
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, min(size, MAX_FILE_BYTES), 0).decode("utf-8", "replace")

    def end(self) -> None:
        """Kill and reap it. May be repeated."""
        if not self._closed:
            self._closed = True
            self.process.kill()
            self.process.wait()
            os.close(self.output)
            os.close(self.errors)


@dataclass(frozen=True)
class Sandbox:
    """A folder, limits, and the programs that were started in it."""

    folder: Path
    """Working directory, empty at first; its plain files are removed by ``clear``."""
    max_bytes: int
    deadline: float
    may_read: tuple[str, ...] = ()
    """Files that programs may read beside their Python."""
    use_landlock: bool = True
    _started: list[Program] = field(default_factory=list, init=False)

    def start(
        self,
        arguments: Sequence[str],
        *,
        stdin: bytes | None = None,
        pass_fds: Sequence[int] = (),
        is_ours: bool = False,
    ) -> Program:
        """Start ``python -I ARGUMENTS`` with ``stdin`` (nothing if ``None``); ``OSError`` if the system refuses.

        The removed files that it holds are counted unless the program ``is_ours``, which may hide them.
        """
        output, errors = os.memfd_create("output"), os.memfd_create("errors")
        given = subprocess.DEVNULL if stdin is None else os.memfd_create("input")
        if stdin is not None:
            _write_all(given, stdin)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", *arguments],
                stdin=given,
                stdout=output,
                stderr=errors,
                env=ENVIRONMENT,
                cwd=self.folder,
                pass_fds=pass_fds,
                preexec_fn=partial(self._confine, os.getpid(), time.monotonic()),
            )
        except BaseException:
            os.close(output)
            os.close(errors)
            raise
        finally:
            if stdin is not None:
                os.close(given)
        program = Program(process, output, errors, self)
        if not is_ours:
            self._started.append(program)
        return program

    def is_full(self) -> bool:
        """Return whether programs have made too many files, or hold too many bytes of files, removed ones included."""
        held: dict[int, int] = {}
        for number, entry in enumerate(os.scandir(self.folder), 1):
            if number > MAX_FOLDER_FILES:  # of names: one file can have thousands
                return True
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                held[entry.inode()] = _bytes_of(entry.stat(follow_symlinks=False))
        for program in self._started:
            if program.process.returncode is None:
                held |= _removed_files(program.process.pid, self.folder)
        return sum(held.values()) > MAX_HELD_BYTES

    def clear(self) -> None:
        """Remove the files that programs have written."""
        for entry in os.scandir(self.folder):
            os.unlink(entry)

    def _confine(self, parent_pid: int, now: float) -> None:
        """Confine the process between ``fork`` and ``exec``."""
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent_pid:
            os._exit(1)
        _drop_capabilities()
        _require(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
        version = landlock_version() if self.use_landlock else 0
        if version > 0:
            _landlock(self.folder, self.may_read)
        install = filter_installer(may_write=version >= 3)  # Landlock below 3 lets any file be truncated
        # last: a copy of a large process may already be above these limits, and can then allocate nothing more
        seconds = int(max(self.deadline - now, 0)) + 2
        for which, most in {
            resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
            resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_CPU: seconds,
            resource.RLIMIT_AS: self.max_bytes,
        }.items():
            resource.setrlimit(which, (most, most))
        install()


@cache
def landlock_version() -> int:
    """Return the kernel's Landlock version; 0 if it has none or it is switched off."""
    return max(0, int(_libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)))


def _landlock(folder: Path, may_read: Sequence[str]) -> None:
    version = landlock_version()
    handled = (1 << (13 + (version >= 2) + (version >= 3))) - 1 | (1 << 15 if version >= 5 else 0)
    attributes = struct.pack("=QQQ", handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    length = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = _libc.syscall(LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(length), 0)
    _require(rules, "landlock_create_ruleset")
    read = FILE_READ | FOLDER_READ | FILE_EXECUTE
    for path in (*_python_folders(), *may_read):
        _allow(rules, path, (read if os.path.isdir(path) else FILE_READ | FILE_EXECUTE) & handled)
    _allow(rules, "/dev/null", (FILE_READ | FILE_WRITE) & handled)
    _allow(rules, str(folder), (FILE_READ | FILE_WRITE | FOLDER_READ | PLAIN_FILES) & handled)
    _require(_libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _allow(rules: int, path: str, access: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", access, descriptor)
    _require(_libc.syscall(LANDLOCK_ADD_RULE, rules, 1, rule, 0), "landlock_add_rule")
    os.close(descriptor)


@cache
def _python_folders() -> tuple[str, ...]:
    """Return the folders and files that Python needs to start and import."""
    homes = {sys.prefix, sys.base_prefix, os.path.dirname(os.path.realpath(sys.executable))}
    system = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero")
    return tuple(sorted(path for path in {*homes, *system} if os.path.exists(path)))


def _drop_capabilities() -> None:
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    _require(_libc.capset(header, bytes(24)), "capset")


def filter_installer(*, may_write: bool) -> Callable[[], None]:
    """Return a function that installs the filter: system calls that act outside the process then fail, after ``exec``
    too."""
    architecture = architecture_named(platform.machine())
    if architecture is None:
        raise OSError(f"no filter is known for {platform.machine()}")
    program = filter_program(architecture, os.getpid(), may_write=may_write)
    buffer = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))

    def install() -> None:
        assert buffer is not None  # the head points at it: it must live until here
        _require(_libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, head, 0, 0), "prctl(PR_SET_SECCOMP)")

    return install


Line = tuple[int, int, int, int]
"""One struct sock_filter (linux/filter.h): code, lines to skip if it is true, if it is false, constant."""
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOWED, KILLED, REFUSED, UNKNOWN = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
"""Results of a filter (linux/seccomp.h): REFUSED is EPERM, UNKNOWN is ENOSYS."""


def filter_program(architecture: Architecture, pid: int, *, may_write: bool) -> bytes:
    """Return the filter of the process ``pid`` in the kernel's form."""
    numbers = architecture.numbers
    # another architecture's calls have other numbers: it is killed before any is compared
    lines: list[Line] = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture.audit), (RETURN, 0, 0, KILLED), (LOAD, 0, 0, 0)]
    for call in NEW_ALLOWED:
        lines += [(EQUAL, 0, 1, call), (RETURN, 0, 0, ALLOWED)]
    lines += [(AT_LEAST, 0, 1, FIRST_NEW), (RETURN, 0, 0, UNKNOWN)]
    for name in (*DENIED, *(() if may_write else WRITING)):
        if name in numbers:
            lines += [(EQUAL, 0, 1, numbers[name]), (RETURN, 0, 0, REFUSED)]
    for name in ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"):
        lines += _only_where(numbers[name], 0, [(EQUAL, pid)])
    lines += _only_where(numbers["prlimit64"], 0, [(EQUAL, 0), (EQUAL, pid)])
    lines += _only_where(numbers["clone"], 0, [(EQUAL, flags) for flags in THREAD_FLAGS])
    lines += _never_where(numbers["fcntl"], 1, [(EQUAL, command) for command in SIGNAL_OWNERS])
    lines += _only_where(numbers["ioctl"], 1, [(EQUAL, command) for command in DEVICE_CALLS])
    if not may_write:
        for name, place in (("open", 1), ("openat", 2)):
            if name in numbers:
                lines += _never_where(numbers[name], place, [(ANY_BIT, WRITE_FLAGS)])
    lines.append((RETURN, 0, 0, ALLOWED))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _only_where(call: int, argument: int, tests: Sequence[tuple[int, int]]) -> list[Line]:
    return _decide(call, argument, tests, otherwise=REFUSED, then=ALLOWED)


def _never_where(call: int, argument: int, tests: Sequence[tuple[int, int]]) -> list[Line]:
    return _decide(call, argument, tests, otherwise=ALLOWED, then=REFUSED)


def _decide(call: int, argument: int, tests: Sequence[tuple[int, int]], *, otherwise: int, then: int) -> list[Line]:
    """Return lines for one call: ``then`` if a test of an argument's low half is true, else ``otherwise``."""
    tried = [(code, len(tests) - i, 0, constant) for i, (code, constant) in enumerate(tests)]
    body = [(LOAD, 0, 0, 16 + 8 * argument), *tried, (RETURN, 0, 0, otherwise), (RETURN, 0, 0, then)]
    return [(EQUAL, 0, len(body), call), *body]


def _require(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _removed_files(pid: int, folder: Path) -> dict[int, int]:
    """Return inode -> bytes of files of the folder that have no name there and that a process holds.

    All threads of a process share its descriptors and its memory, and ``/proc`` shows them of each thread that has not
    ended. The first thread may end long before the others.
    """
    seen: set[str] = set()
    for _ in range(MAX_GLANCES):
        try:
            new = set(os.listdir(f"/proc/{pid}/task")) - seen
        except (FileNotFoundError, ProcessLookupError):
            return {}
        if not new:  # all have ended
            return {}
        for number in new:
            held = _held_by(f"/proc/{pid}/task/{number}", folder)
            if held is not None:
                return held
        seen |= new
    return HIDDEN


def _held_by(thread: str, folder: Path) -> dict[int, int] | None:
    """``_removed_files`` as one thread shows them; ``None`` if it has ended.

    By a descriptor: the file's bytes. By a mapping, of one page or of all: the most that the file can have.
    """
    held: dict[int, int] = {}
    is_refused = False
    try:
        for number in os.listdir(f"{thread}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if _is_removed(os.readlink(f"{thread}/fd/{number}"), folder):
                    found = os.stat(f"{thread}/fd/{number}")
                    held[found.st_ino] = _bytes_of(found)
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError:  # it hides them, or has ended: its descriptors are root's then, while its memory is empty
        is_refused = True
    try:
        # After the descriptors, which a thread keeps as long as its memory: those of one that has it still were there.
        maps = Path(f"{thread}/maps").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except PermissionError:  # prctl(PR_SET_DUMPABLE)
        return HIDDEN
    if not maps:
        return None
    for line in maps.split(b"\n"):  # the one character of a name that the kernel escapes
        words = line.split(maxsplit=5)
        if len(words) == 6 and _is_removed(os.fsdecode(words[5]), folder):
            held.setdefault(int(words[4]), MAX_FILE_BYTES)
    return HIDDEN if is_refused else held


def _bytes_of(found: os.stat_result) -> int:
    """The size of a file, or what it takes on the disk where that is more."""
    return max(found.st_size, 512 * found.st_blocks)


def _is_removed(shown: str, folder: Path) -> bool:
    """Return whether an entry of ``/proc`` is a file of the folder without a name there (any more, or with O_TMPFILE
    ever)."""
    return shown.startswith(f"{folder}/") and shown.endswith(" (deleted)")


def _readable(descriptor: int, timeout_s: float) -> bool:
    return bool(select.select([descriptor], [], [], timeout_s)[0])


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
