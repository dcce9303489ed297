"""Attacks on shared resources: programs that hold more than a sandbox may, for promises and benchmarks.

Each attack is a Python program that sets `held`, and prints it if nothing stops the program in time.
"""

from prorl_envs.sandbox.limits.kernel_counters import counters

#: Seconds after which an attack that was not stopped prints `held`. The monitor checks a busy sandbox every
#: two seconds; on two loaded cores, checks took up to 20 s.
HELD_S = 60

START = """
import errno, os, select, socket, threading, time
def block(size=1 << 20):
    return b"x" * size
def send(sock, *fds, content=b"x"):
    # The kernel counts other programs of the user too, and releases the descriptors of ended ones later.
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.send_fds(sock, [content], fds)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS or time.monotonic() > deadline:
                raise
        time.sleep(0.1)
def fly(*fds):
    ours, theirs = socket.socketpair()
    socket.send_fds(ours, [b"x"], fds)
    return ours, theirs
files = []
def fill(count, size, then=lambda file: None, in_memory=True):
    for number in range(count):
        name, flags = f"file{number}", os.O_CREAT | os.O_RDWR
        file = os.memfd_create(name) if in_memory else os.open(name, flags)
        files.append(file)
        if not in_memory:
            os.unlink(name)
        for _ in range(size):
            os.write(file, block())
        then(file)
        time.sleep(0.3)
    return count * size
def send_and_close(file):
    send(kept[0], file)
    os.close(file)
"""
END = f"""
time.sleep({HELD_S})
print("held", held)
"""

#: An open file keeps the watches of its closed duplicates.
_WATCHES = """
import resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
reader, _ = os.pipe()
numbers = [os.dup(reader) for _ in range(min(hard, 16384) - 600)]
held, epolls = 0, []
for _ in range(500):
    epolls.append(select.epoll())
    for number in numbers:
        epolls[-1].register(number)
    held += len(numbers)
    if held > 1.3 * SHARE:
        break
for number in numbers:
    os.close(number)
"""
_DESCRIPTORS_IN_FLIGHT = """
null = os.open("/dev/null", os.O_RDONLY)
held, sockets = 0, []
while held < 1.5 * SHARE:
    sockets.append(socket.socketpair())
    send(sockets[-1][0], *[null] * 200)
    held += 200
"""
_MEMORY_IN_FLIGHT = """
kept = socket.socketpair()
send(kept[0], 0)
held = fill(10, 64, send_and_close)
"""
_HIGH_DESCRIPTORS = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (7000, 8192))
low = [os.open("/dev/null", os.O_RDONLY) for _ in range(4200)]
held = fill(6, 64)
"""
#: Mappings by Python keep a descriptor; mappings by the C library do not.
_LIBRARY = """
import ctypes
c = ctypes.CDLL(None)
c.mmap.restype = ctypes.c_void_p
c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
"""
_DISK_MAPPED = f"""
{_LIBRARY}
def map_and_close(file):
    c.mmap(None, 30 << 20, 1, 1, file, 0)
    os.close(file)
held = fill(10, 30, map_and_close, in_memory=False)
"""
_DISK_IN_FLIGHT = """
kept = socket.socketpair()
send(kept[0], 0)
held = fill(10, 30, send_and_close, in_memory=False)
"""
#: After one peek, the kernel does not show an empty datagram again.
_HIDDEN_IN_FLIGHT = """
null = os.open("/dev/null", os.O_RDONLY)
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
held = 8
for _ in range(held):
    send(ours, null, content=b"")
theirs.setsockopt(socket.SOL_SOCKET, 42, 0)
for _ in range(held):
    theirs.recv(1, socket.MSG_PEEK)
"""
_FIRST_THREAD_ENDED = f"""
import ctypes
held = 0
def go_on():
    while " Z " not in open("/proc/self/stat").read():
        time.sleep(0.1)
    kept = [bytearray(block(256 << 20))]
    time.sleep({HELD_S})
    os.write(1, b"held 256")
    os._exit(0)
threading.Thread(target=go_on).start()
ctypes.CDLL(None).syscall({{"x86_64": 60, "aarch64": 93}}[os.uname().machine], 0)
"""
#: Programs without read permission, and processes that are not dumpable, belong to root in /proc.
_UNREADABLE = """
import shutil, sys
if sys.argv[-1] != "again":
    own = shutil.copy(os.path.realpath(sys.executable), "own")
    os.chmod(own, 0o111)
    os.environ.update(PYTHONHOME=sys.base_prefix, LD_LIBRARY_PATH=sys.base_prefix + "/lib")
    os.execv(own, [own, "-c", open("/proc/self/cmdline").read().split("\\0")[3], "again"])
held = fill(10, 64)
"""
_PAGE_TABLES = """
import mmap
space = mmap.mmap(-1, 1 << 39, 0x4022, mmap.PROT_READ)  # private, anonymous, without reserve
held = sum(space[place] for place in range(0, 1 << 39, 2 << 20))
"""
_SOCKET_BUFFERS = """
held, kept = 0, []
listener = socket.create_server(("127.0.0.1", 0), backlog=1000)
for number in range(1000):
    if number % 2:
        pair = socket.socketpair()
    else:
        pair = socket.create_connection(listener.getsockname()), listener.accept()[0]
    for sock in pair:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        try:
            while True:
                held += sock.send(block(1 << 15))
        except BlockingIOError:
            pass
    kept.append(pair)
"""
_MAPPINGS = f"""
{_LIBRARY}
c.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
held = 0
for _ in range(24):
    if os.fork() == 0:
        start = c.mmap(None, 520 << 20, 3, 0x4022, -1, 0)  # private, anonymous, without reserve
        for place in range(start, start + (510 << 20), 8192):
            c.mprotect(place, 4096, 0)
        time.sleep({HELD_S})
        os._exit(0)
    held += 16
if os.WIFSIGNALED(os.wait()[1]):
    os.kill(os.getpid(), 9)  # as its child was
"""


def attack(name: str) -> str:
    """Return the program of an attack, whose name is a key of `ATTACKS`."""
    share = counters()[_SHARES[name]].share if name in _SHARES else 0
    return f"SHARE = {share}\n{START}{ATTACKS[name]}{END}"


_PIPES = """
held, pipes = 0, []
while held <= SHARE:
    os.mkfifo(f"pipe{held}")
    pipes.append(os.open(f"pipe{held}", os.O_RDWR))
    pipes.extend(os.pipe())
    sent = os.pipe()
    pipes.extend(fly(sent[0]))
    for number in sent:
        os.close(number)
    held += 3
"""


_SHARES = {"epoll watches": "watches", "descriptors in flight": "in_flight", "pipes": "pipes"}
ATTACKS = {
    "epoll watches": _WATCHES,
    "descriptors in flight": _DESCRIPTORS_IN_FLIGHT,
    "memory files in flight": _MEMORY_IN_FLIGHT,
    "memory files at high descriptors": _HIGH_DESCRIPTORS,
    "unlinked files in flight": _DISK_IN_FLIGHT,
    "unlinked files mapped": _DISK_MAPPED,
    "descriptors that cannot be seen": _HIDDEN_IN_FLIGHT,
    "first thread ended": _FIRST_THREAD_ENDED,
    "unreadable program": _UNREADABLE,
    "page tables": _PAGE_TABLES,
    "buffers of sockets": _SOCKET_BUFFERS,
    "mappings": _MAPPINGS,
    "pipes": _PIPES,
}
