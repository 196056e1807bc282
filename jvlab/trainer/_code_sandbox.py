"""Runs a program that a model wrote: `jv.rewards.code` starts this file in an interpreter of its own. No other imports.

    python -I -S -B _code_sandbox.py VERDICT     a file descriptor; the order is JSON on standard input

It takes everything away from itself that a program does not need, runs the program and then its tests, and writes the
order's secret word and the number of tests that passed to VERDICT.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import platform
import signal
import struct
import sys

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # as the filter knows them
# Refused calls of the kernel, with their numbers on x86_64 and aarch64: processes, programs, signals to others,
# sockets, memory that outlives a process, ways around the filter, and what Landlock leaves alone: owners, modes and
# times of files, priorities, keys.
REFUSED = """
fork                   57    -
vfork                  58    -
execve                 59  221
execveat              322  281
kill                   62  129
tkill                 200  130
rt_sigqueueinfo       129  138
rt_tgsigqueueinfo     297  240
pidfd_open            434  434
pidfd_send_signal     424  424
socket                 41  198
socketpair             53  199
io_uring_setup        425  425
shmget                 29  194
semget                 64  190
msgget                 68  186
mq_open               240  180
memfd_create          319  279
ptrace                101  117
process_vm_readv      310  270
process_vm_writev     311  271
mount                 165   40
unshare               272   97
setns                 308  268
chroot                161   51
pivot_root            155   41
open_by_handle_at     304  265
bpf                   321  280
perf_event_open       298  241
keyctl                250  219
chmod                  90    -
fchmod                 91   52
fchmodat              268   53
fchmodat2             452  452
chown                  92    -
fchown                 93   55
lchown                 94    -
fchownat              260   54
utime                 132    -
utimes                235    -
futimesat             261    -
utimensat             280   88
truncate               76   45
setxattr              188    5
lsetxattr             189    6
fsetxattr             190    7
setxattrat            463  463
removexattr           197   14
lremovexattr          198   15
fremovexattr          199   16
removexattrat         466  466
setpriority           141  140
sched_setparam        142  118
sched_setscheduler    144  119
sched_setaffinity     203  122
sched_setattr         314  274
ioprio_set            251   30
add_key               248  217
request_key           249  218
"""
CLONE = (56, 220)
CLONE3 = (435, 435)
TGKILL = (234, 131)
CAPSET = (126, 91)
PRLIMIT64 = (302, 261)
FCNTL = (72, 25)
CLONE_THREAD = 0x10000
LANDLOCK = (444, 445, 446)  # create_ruleset, add_rule, restrict_self; on both
READ = 0b1101  # execute, read a file, read a folder
READABLE = ("/usr", "/lib", "/lib64", "/dev/null", "/dev/zero", "/dev/urandom")
FILES = 8 << 20  # bytes, the largest that it may write


def missing() -> str:
    """Why programs cannot be isolated here; "" if they can."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return f"{sys.platform} on {platform.machine()} has no filter here"
    version = _libc().syscall(LANDLOCK[0], None, 0, 1)
    return "" if version >= 1 else "the kernel has no Landlock"


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(what: str, result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
    return result


def limit(memory: int, seconds: float, processes: int) -> None:
    """Bounds that every system has; `processes` counts those of the user."""
    import resource

    cpu = int(seconds) + 1
    for name, value in (
        ("RLIMIT_CPU", cpu),
        ("RLIMIT_AS", memory),
        ("RLIMIT_FSIZE", FILES),
        ("RLIMIT_NOFILE", 64),
        ("RLIMIT_NPROC", processes),
        ("RLIMIT_CORE", 0),
    ):
        _, most = resource.getrlimit(getattr(resource, name))
        least = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(getattr(resource, name), (least, least))


def isolate(folder: str) -> None:
    """No capabilities, no files but the interpreter's own and those of `folder`, no processes, signals and sockets."""
    libc = _libc()
    column = list(MACHINES).index(platform.machine())
    header = struct.pack("=Ii", 0x20080522, 0)
    _check("capset", libc.syscall(CAPSET[column], header, bytes(24)))
    _check("no new privileges", libc.prctl(38, 1, 0, 0, 0))
    _confine(libc, folder)
    code = _program(column)
    filters = ctypes.create_string_buffer(code)
    told = struct.pack("HP", len(code) // 8, ctypes.addressof(filters))
    _check("seccomp", libc.prctl(22, 2, told, 0, 0))


def _confine(libc: ctypes.CDLL, folder: str) -> None:
    version = _check("Landlock", libc.syscall(LANDLOCK[0], None, 0, 1))
    known = {1: 13, 2: 14}.get(version, 15)  # rights that it can refuse
    every = (1 << known) - 1
    rights = struct.pack("=Q", every)
    ruleset = _check("Landlock", libc.syscall(LANDLOCK[0], rights, 8, 0))
    allowed = dict.fromkeys((*READABLE, sys.base_prefix), READ)
    allowed[folder] = every & ~1  # not to execute
    for path, may in allowed.items():
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not os.path.isdir(path):
            may &= 0b110  # rights of a file: write, read
        rule = struct.pack("=Qi", may, opened)
        _check(path, libc.syscall(LANDLOCK[1], ruleset, 1, rule, 0))
        os.close(opened)
    _check("Landlock", libc.syscall(LANDLOCK[2], ruleset, 0))
    os.close(ruleset)


def _program(column: int) -> bytes:
    """A classic BPF program: kill another architecture's calls, refuse some, allow the others."""
    step = lambda code, yes, no, k: struct.pack("HBBI", code, yes, no, k)
    load = lambda at: step(0x20, 0, 0, at)
    equal = lambda k, yes, no: step(0x15, yes, no, k)
    kill = step(0x06, 0, 0, 0x80000000)
    refuse = lambda error: step(0x06, 0, 0, 0x00050000 | error)
    allow = step(0x06, 0, 0, 0x7FFF0000)
    out = [load(4), equal([*MACHINES.values()][column], 1, 0), kill, load(0)]
    if column == 0:  # the x32 calls, which have other numbers
        out += [step(0x35, 0, 1, 0x40000000), kill]
    for line in REFUSED.strip().splitlines():
        number = line.split()[1 + column]
        if number != "-":
            out += [equal(int(number), 0, 1), refuse(errno.EPERM)]
    # so that the C library starts a thread by clone, whose flags a filter can read
    out += [equal(CLONE3[column], 0, 1), refuse(errno.ENOSYS)]
    out += [equal(CLONE[column], 0, 4), load(16)]
    out += [step(0x45, 0, 1, CLONE_THREAD), allow, refuse(errno.EPERM)]
    # its own limits: a limit of 0 s on the CPU ends another process
    out += [equal(PRLIMIT64[column], 0, 4), load(16)]
    out += [equal(0, 0, 1), allow, refuse(errno.EPERM)]
    # not to whom a file sends signals: F_SETOWN, F_SETOWN_EX
    out += [equal(FCNTL[column], 0, 5), load(24)]
    out += [equal(8, 1, 0), equal(15, 0, 1), refuse(errno.EPERM), allow]
    # to its own threads, as abort() does
    out += [equal(TGKILL[column], 0, 4), load(16)]
    out += [equal(os.getpid(), 0, 1), allow, refuse(errno.EPERM), allow]
    return b"".join(out)


def main() -> None:
    """Runs what standard input says."""
    verdict = int(sys.argv[1])
    order = json.load(sys.stdin.buffer)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # so that the program cannot read its order
    os.close(nothing)
    if sys.platform == "linux":
        _libc().prctl(1, signal.SIGKILL, 0, 0, 0)  # when whoever started it dies
    if os.getppid() != order["parent"]:
        return  # it died before
    full = order["isolation"] == "full"
    limit(order["memory"], order["seconds"], 1 << 20 if full else 64)
    if full:
        isolate(os.getcwd())
    sys.stdin = io.TextIOWrapper(io.BytesIO(order["stdin"].encode()))
    sys.argv = ["program.py"]
    space = {"__name__": "__main__"}
    passed = 0
    try:
        exec(compile(order["program"], "program.py", "exec"), space)
    except SystemExit as left:
        if left.code not in (None, 0):
            return
    for test in order["tests"]:
        try:
            exec(compile(test, "test.py", "exec"), space)
        except BaseException:
            continue
        passed += 1
    sys.stdout.flush()
    os.write(verdict, f"{order['word']} {passed}".encode())


if __name__ == "__main__":
    main()
