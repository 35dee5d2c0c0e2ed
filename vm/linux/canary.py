"""Looks for a secret of a machine in the memory of the processes that serve it: canary.py SHARE PIDFILE

Waits for the file `scan` in the folder SHARE, and reads the secret from the file `secret` there. Searches every readable
mapping and every file in memory of the process whose id is in PIDFILE, and of all its descendants. Writes a line to the
file `scanned`: the hits, the number of processes, and how often the mark of a pool was found.
"""
import os
import re
import sys
import time

CHUNK = 4 << 20
MARK = b"ringfence-pool 1"


def descendants(root):
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat:
                parents[int(name)] = int(stat.read().rpartition(")")[2].split()[1])
        except OSError:
            pass  # The process has ended.
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def count(read, start, end, words):
    """Counts each word in the bytes from `start` to `end`, also across chunks."""
    hits, kept = [0] * len(words), b""
    longest = max(map(len, words)) - 1
    while start < end:
        length = min(CHUNK, end - start)
        try:
            part = read(length, start)
        except OSError:
            part = b""
        # A chunk in which a page cannot be read is searched page by page.
        if len(part) < length and length > 4096:
            end_of_part = start + length
            for at in range(start, end_of_part, 4096):
                more = count(read, at, min(at + 4096, end_of_part), words)
                hits = [one + other for one, other in zip(hits, more)]
            start, kept = end_of_part, b""
            continue
        text = kept + part
        for number, word in enumerate(words):
            hits[number] += text.count(word) - kept.count(word)
        kept, start = text[-longest:], start + length
    return hits


def search(pid, words):
    total = [0] * len(words)

    def add(hits):
        total[:] = [one + other for one, other in zip(total, hits)]

    with open(f"/proc/{pid}/maps") as maps:
        mappings = [re.match(r"(\w+)-(\w+) (....) \S+ \S+ \S+ *(.*)", line) for line in maps]
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    for mapping in mappings:
        if mapping[3][0] == "r" and not mapping[4].startswith("[v"):
            read = lambda length, at: os.pread(memory, length, at)
            add(count(read, int(mapping[1], 16), int(mapping[2], 16), words))
    os.close(memory)
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        if os.readlink(path).startswith("/memfd:"):
            file = os.open(path, os.O_RDONLY)
            add(count(lambda length, at: os.pread(file, length, at), 0, os.fstat(file).st_size, words))
            os.close(file)
    return total


share, pid_file = sys.argv[1:]
while not os.path.exists(f"{share}/scan"):
    time.sleep(0.1)
with open(f"{share}/secret", "rb") as file:
    secret = file.read().strip()
with open(pid_file) as file:
    processes = descendants(int(file.read()))
try:
    found = [search(pid, [secret, MARK]) for pid in processes]
    line = f"hits {sum(hits for hits, _ in found)} processes {len(found)} marks {sum(marks for _, marks in found)}"
except OSError as error:
    line = f"failed: {error}"
with open(f"{share}/scanned.new", "w") as file:
    print(line, file=file)
os.rename(f"{share}/scanned.new", f"{share}/scanned")
