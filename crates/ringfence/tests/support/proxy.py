"""Upstream proxies for the tests of egress.

proxy.py ADDRESS MODE:PORT[:USER:PASSWORD]...

Modes: http, socks; slow and joined are http whose answer comes byte by byte, or with the server's first bytes; garbage,
endless, closing and silent are hostile. Names come from a table that no name server has. Each request is printed.
"""

import base64
import ipaddress
import select
import socket
import sys
import threading

NAMES = {"a.test": "198.51.100.1", "b.test": "198.51.100.1", "only.proxy.test": "198.51.100.2"}


def read(connection, count):
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError
        data += more
    return data


def open_server(host, port):
    """Returns a connection, or None for an unknown name or a refusal."""
    try:
        return socket.create_connection((NAMES.get(host) or str(ipaddress.ip_address(host)), port))
    except (ValueError, OSError):
        return None


def relay(one, other):
    peers = {one: other, other: one}
    while peers:
        for source in select.select(list(peers), [], [])[0]:
            try:
                data = source.recv(1 << 16)
                peers[source].sendall(data) if data else peers[source].shutdown(socket.SHUT_WR)
            except OSError:
                return
            if not data:
                del peers[source]


def http(connection, mode, credentials):
    request = b""
    while not request.endswith(b"\r\n\r\n"):
        request += read(connection, 1)
    line, *fields = request.decode().split("\r\n")
    method, target, version = line.split(" ")
    assert (method, version) == ("CONNECT", "HTTP/1.1") and f"Host: {target}" in fields, request
    print("asked", target, flush=True)
    host, port = target.rsplit(":", 1)
    basic = base64.b64encode(credentials.encode()).decode()
    if credentials and f"Proxy-Authorization: Basic {basic}" not in fields:
        return connection.sendall(b"HTTP/1.1 407 Who\r\nProxy-Authenticate: Basic\r\nContent-Length: 5\r\n\r\nwho?\n")
    if host == "forbidden.test":
        return connection.sendall(b"HTTP/1.1 403 \x1b[31mNo\r\n\r\n")
    server = open_server(host.strip("[]"), int(port))
    if not server:
        return connection.sendall(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
    answer = b"HTTP/1.1 200 Connection established\r\nVia: test\r\n\r\n"
    if mode == "joined":
        answer += server.recv(1 << 16)
    for piece in [answer[at : at + 1] for at in range(len(answer))] if mode == "slow" else [answer]:
        connection.sendall(piece)
    relay(connection, server)


def socks(connection, _mode, credentials):
    if read(connection, 1) != b"\x05":
        return None
    methods = read(connection, read(connection, 1)[0])
    if (2 if credentials else 0) not in methods:
        return connection.sendall(b"\x05\xff")
    connection.sendall(bytes([5, 2 if credentials else 0]))
    if credentials:
        read(connection, 1)
        user, password = (read(connection, read(connection, 1)[0]) for _ in range(2))
        if f"{user.decode()}:{password.decode()}" != credentials:
            return connection.sendall(b"\x01\x01")
        connection.sendall(b"\x01\x00")
    version, command, _, kind = read(connection, 4)
    assert (version, command) == (5, 1)
    if kind == 3:
        host = read(connection, read(connection, 1)[0]).decode()
    else:
        host = str(ipaddress.ip_address(read(connection, 4 if kind == 1 else 16)))
    port = int.from_bytes(read(connection, 2), "big")
    print("asked", f"{host}:{port}", flush=True)
    if host == "forbidden.test":
        return connection.sendall(b"\x05\x02\x00\x01\0\0\0\0\0\0")
    server = open_server(host, port)
    if not server:
        return connection.sendall(b"\x05\x04\x00\x01\0\0\0\0\0\0")
    connection.sendall(b"\x05\x00\x00\x03\x04test\0\x50")
    relay(connection, server)


def garbage(connection, *_):
    connection.sendall(bytes(range(256)) * 64)


def endless(connection, *_):
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"X-More: %s\r\n" % (b"x" * 1000))


def closing(connection, *_):
    connection.recv(1)


def silent(connection, *_):
    print("asked", connection.recv(1 << 16).split(b"\r\n")[0].decode(), flush=True)
    connection.recv(1)


HANDLERS = {"slow": http, "joined": http}


def handle(connection, mode, credentials):
    with connection:
        try:
            HANDLERS.get(mode, globals().get(mode))(connection, mode, credentials)
        except OSError:
            pass


def serve(server, mode, credentials):
    while True:
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=handle, args=(connection, mode, credentials)).start()


for word in sys.argv[2:]:
    mode, port, *credentials = word.split(":", 2)
    server = socket.create_server((sys.argv[1], int(port)))
    threading.Thread(target=serve, args=(server, mode, "".join(credentials))).start()
print("listening", flush=True)
