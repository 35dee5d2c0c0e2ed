"""Ends of the scenarios' traffic: peer.py MODE ADDRESS PORT [ARGUMENT...].

    serve    TCP and UDP: answers with the client's address, and the length and the hash of what came
    tcp      sends LENGTH bytes to a server, and prints the answer if the hash is right
    udp      the same by one datagram
    names    name server for www.far.test and l.root-servers.net: 198.51.100.1 and 2001:db8:ffff::1
    shell    runs the commands that arrive at the Unix socket ADDRESS
"""
import hashlib
import os
import socket
import subprocess
import sys
import threading
import time

PATTERN = bytes(range(251))
# Names that the name server knows.
NAMES = [b"\3www\3far\4test\0", b"\1l\x0croot-servers\3net\0"]
# Commands that the scenarios give to a shell.
FUNCTIONS = "tcp() { python3 /clients/peer.py tcp $*; }; udp() { python3 /clients/peer.py udp $*; }; "


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def data(length):
    return (PATTERN * (length // len(PATTERN) + 1))[:length]


def report(client, received, digest):
    address = client[0].removeprefix("::ffff:")
    return f"{address} {received} {digest.hexdigest()}\n".encode()


def hear(connection, client):
    digest, received = hashlib.sha256(), 0
    while chunk := connection.recv(1 << 18):
        digest.update(chunk)
        received += len(chunk)
    connection.sendall(report(client, received, digest))
    connection.close()


def serve_udp(server):
    while True:
        datagram, client = server.recvfrom(65536)
        server.sendto(report(client, len(datagram), hashlib.sha256(datagram)), client)


def bound(kind, address, port):
    server = socket.socket(family(address), kind)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((address, port))
    return server


def serve(address, port, *_):
    datagrams, server = bound(socket.SOCK_DGRAM, address, port), bound(socket.SOCK_STREAM, address, port)
    server.listen(64)
    threading.Thread(target=serve_udp, args=(datagrams,), daemon=True).start()
    while True:
        threading.Thread(target=hear, args=server.accept(), daemon=True).start()


def checked(answer, sent):
    if not answer:
        raise SystemExit("closed without an answer")
    client, received, digest = answer.decode().split()
    if received != str(len(sent)) or digest != hashlib.sha256(sent).hexdigest():
        raise SystemExit(f"{received} of {len(sent)} bytes arrived, or others")
    print("client", client)


def tcp(address, port, length="100000", *_):
    sent = data(int(length))
    for _ in range(50):
        try:
            connection = socket.create_connection((address, port), 20)
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            while chunk := connection.recv(4096):
                answer += chunk
        except (ConnectionRefusedError, ConnectionResetError):
            answer = b""
        # A forwarder accepts before its server listens, and closes then.
        if answer:
            break
        time.sleep(0.1)
    checked(answer, sent)


def udp(address, port, length="1200", *_):
    sent = data(int(length))
    client = socket.socket(socket.getaddrinfo(address, port)[0][0], socket.SOCK_DGRAM)
    client.settimeout(0.5)
    client.connect((address, port))
    for _ in range(30):
        try:
            client.send(sent)
            return checked(client.recv(65536), sent)
        except ConnectionRefusedError:
            time.sleep(0.2)
        except TimeoutError:
            pass
    raise SystemExit("no answer")


def names(address, port, *_):
    server = bound(socket.SOCK_DGRAM, address, port)
    known = {1: socket.inet_aton("198.51.100.1"), 28: socket.inet_pton(socket.AF_INET6, "2001:db8:ffff::1")}
    while True:
        query, client = server.recvfrom(512)
        end = query.index(b"\0", 12) + 5
        is_known = query[12 : end - 4] in NAMES
        kind = int.from_bytes(query[end - 4 : end - 2], "big")
        value = known.get(kind) if is_known else None
        answer = b"\xc0\x0c" + query[end - 4 : end] + b"\0\0\0\1" + len(value).to_bytes(2, "big") + value if value else b""
        flags = b"\x81\x80" if is_known else b"\x81\x83"
        server.sendto(query[:2] + flags + b"\0\1" + bytes([0, bool(value)]) + b"\0\0\0\0" + query[12:end] + answer, client)


def shell(path, *_):
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    os.chmod(path, 0o666)
    server.listen(8)
    while True:
        connection = server.accept()[0]
        command = connection.makefile().readline()
        done = subprocess.run(FUNCTIONS + command, shell=True, stdout=connection, stderr=connection, stdin=subprocess.DEVNULL)
        connection.sendall(b"status %d\n" % done.returncode)
        connection.close()


def outside(path, _, *words):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(" ".join(words).encode() + b"\n")
    text, status = connection.makefile().read().rsplit("status ", 1)
    sys.stdout.write(text)
    raise SystemExit(int(status))


mode, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
globals()[mode](address, port, *sys.argv[4:])
