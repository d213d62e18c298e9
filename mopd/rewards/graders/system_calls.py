"""Numbers of Linux's system calls, and which of them act outside the process that makes them (``sandbox.py``)."""

from __future__ import annotations

import re
from dataclasses import dataclass

NEW_ALLOWED = (436, 439, 441, 449, 454, 455, 456)
"""close_range, faccessat2, epoll_pwait2 and futexes: the allowed ones of the calls since Linux 5.1, whose numbers are
the same everywhere."""
FIRST_NEW = 424
"""First number that is reported as unknown, as on an older kernel: ``clone3`` and ``openat2`` hide their arguments from
a filter, and ``io_uring`` would open files and sockets without passing one."""
_DENIED = """
of other processes: fork vfork setsid setpgid tkill ptrace process_vm_readv process_vm_writev kcmp setpriority
    sched_setscheduler sched_setparam sched_setattr sched_setaffinity ioprio_set migrate_pages move_pages
of the network, and what outlives a process: socket shmget shmat shmctl msgget msgsnd msgrcv msgctl semget semctl semop
    semtimedop mq_open mq_unlink memfd_create add_key request_key keyctl
of files, where pipes and sockets would hold their descriptors and pages uncounted: sendmsg sendmmsg sendfile splice tee
    vmsplice
of the system: unshare setns mount umount2 pivot_root chroot reboot kexec_load kexec_file_load init_module
    finit_module delete_module bpf perf_event_open userfaultfd swapon swapoff acct quotactl settimeofday clock_settime
    clock_adjtime adjtimex sethostname setdomainname iopl ioperm personality fanotify_init syslog vhangup modify_ldt
    lookup_dcookie nfsservctl
of files, beyond their size: fallocate
of files, where Landlock does not look: chmod fchmod fchmodat chown lchown fchown fchownat setxattr lsetxattr fsetxattr
    removexattr lremovexattr fremovexattr utime utimes futimesat utimensat name_to_handle_at open_by_handle_at flock
"""
_WRITING = """
of files, where Landlock cannot keep writing inside a folder: creat truncate mkdir mkdirat unlink unlinkat rmdir rename
    renameat renameat2 link linkat symlink symlinkat mknod mknodat
"""
_NUMBERS = """
fork 57 -, vfork 58 -, setsid 112 157, setpgid 109 154, tkill 200 130, ptrace 101 117, process_vm_readv 310 270
process_vm_writev 311 271, kcmp 312 272, setpriority 141 140, sched_setscheduler 144 119, sched_setparam 142 118
sched_setattr 314 274, sched_setaffinity 203 122, ioprio_set 251 30, migrate_pages 256 238, move_pages 279 239
socket 41 198, shmget 29 194, shmat 30 196, shmctl 31 195, msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187
semget 64 190, semctl 66 191, semop 65 193, semtimedop 220 192, mq_open 240 180, mq_unlink 241 181
memfd_create 319 279, add_key 248 217, request_key 249 218, keyctl 250 219, unshare 272 97, setns 308 268
mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, reboot 169 142, kexec_load 246 104
kexec_file_load 320 294, init_module 175 105, finit_module 313 273, delete_module 176 106, bpf 321 280
perf_event_open 298 241, userfaultfd 323 282, swapon 167 224, swapoff 168 225, acct 163 89, quotactl 179 60
settimeofday 164 170, clock_settime 227 112, clock_adjtime 305 266, adjtimex 159 171, sethostname 170 161
setdomainname 171 162, iopl 172 -, ioperm 173 -, personality 135 92, fanotify_init 300 262, syslog 103 116
vhangup 153 58, modify_ldt 154 -, lookup_dcookie 212 18, nfsservctl 180 42, chmod 90 -, fchmod 91 52, fchmodat 268 53
chown 92 -, lchown 94 -, fchown 93 55, fchownat 260 54, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7
removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, utime 132 -, utimes 235 -, futimesat 261 -
utimensat 280 88, name_to_handle_at 303 264, open_by_handle_at 304 265, flock 73 32, creat 85 -, truncate 76 45
mkdir 83 -, mkdirat 258 34, unlink 87 -, unlinkat 263 35, rmdir 84 -, rename 82 -, renameat 264 38, renameat2 316 276
link 86 -, linkat 265 37, symlink 88 -, symlinkat 266 36, mknod 133 -, mknodat 259 33, kill 62 129, tgkill 234 131
rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, prlimit64 302 261, clone 56 220, open 2 -, openat 257 56
fcntl 72 25, ioctl 16 29, sendmsg 46 211, sendmmsg 307 269, sendfile 40 71, splice 275 76, tee 276 77, vmsplice 278 75
fallocate 285 47
"""
"""Name, number on x86_64, number on aarch64 (include/uapi/asm-generic/unistd.h); ``-`` if the machine lacks it."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A processor architecture as a filter sees it."""

    audit: int
    """AUDIT_ARCH of linux/audit.h."""
    numbers: dict[str, int]
    """Name -> number of its system calls."""


def architecture_named(name: str) -> Architecture | None:
    """Return the architecture that ``platform.machine()`` names; ``None`` if its numbers are not known here."""
    audits = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
    if name not in audits:
        return None
    column = 1 + list(audits).index(name)
    rows = [row.split() for row in _NUMBERS.replace("\n", ",").split(",") if row.strip()]
    return Architecture(audit=audits[name], numbers={row[0]: int(row[column]) for row in rows if row[column] != "-"})


def _names(text: str) -> tuple[str, ...]:
    return tuple(word for part in re.split(r"^of [^:]*:", text, flags=re.M) for word in part.split())


DENIED, WRITING = _names(_DENIED), _names(_WRITING)
"""Calls refused whatever their arguments; ``WRITING``: those refused too if programs may write nothing."""
