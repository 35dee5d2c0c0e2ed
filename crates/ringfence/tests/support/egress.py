"""Servers and adversaries for the tests of egress policies.

egress.py serve ADDRESS...      HTTP on port 80, HTTPS on 443, a counter of bytes on 9000, a greeting on 22,
                                an echo of datagrams on 443
egress.py hello IP NAME HOW     sends a ClientHello: whole, bytes, records, nameless, ech, slow
egress.py second IP FIRST NAME HOW
                                sends a ClientHello for FIRST to port 9000, then a second one for NAME, as if the server had
                                asked for it
egress.py send IP PORT TEXT     sends bytes to a TCP port
egress.py datagram IP PORT      sends a datagram
egress.py files IP PORT FILE... sends files as datagrams of one socket, and waits for as many answers

Clients print one line: the outcome, and the time that it took in milliseconds.
"""

import http.server
import socket
import ssl
import sys
import threading
import time


class Page(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply(b"page\n")

    def do_POST(self):
        left, received = int(self.headers["Content-Length"]), 0
        while received < left:
            received += len(self.rfile.read(min(1 << 16, left - received)))
        self.reply(b"received %d\n" % received)

    def reply(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def counter(server):
    """Prints the number of bytes of each connection."""
    with server:
        while True:
            connection, _ = server.accept()
            total = 0
            try:
                while data := connection.recv(1 << 16):
                    total += len(data)
            except OSError:
                pass
            connection.close()
            print("counted", total, flush=True)


def greeter(server):
    with server:
        while True:
            connection, _ = server.accept()
            connection.sendall(b"SSH-2.0-server\r\n")
            connection.sendall(connection.recv(100))
            connection.close()


def echo(server):
    """Returns datagrams, and prints their lengths."""
    with server:
        while True:
            data, client = server.recvfrom(1 << 16)
            print("datagram", len(data), flush=True)
            server.sendto(data, client)


def serve(*addresses):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain("cert.pem", "key.pem")
    for address in addresses:
        plain = http.server.ThreadingHTTPServer((address, 80), Page)
        secure = http.server.ThreadingHTTPServer((address, 443), Page)
        secure.socket = context.wrap_socket(secure.socket, server_side=True, do_handshake_on_connect=False)
        for server in (plain, secure):
            threading.Thread(target=server.serve_forever).start()
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        datagrams.bind((address, 443))
        streams = [(target, socket.create_server((address, port))) for target, port in ((counter, 9000), (greeter, 22))]
        for target, server in [*streams, (echo, datagrams)]:
            threading.Thread(target=target, args=(server,)).start()
    print("listening", flush=True)


def client_hello(name):
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()


def with_ech(record):
    """Appends an empty GREASE extension of an encrypted hello."""
    hello = bytearray(record[5:])
    suites = 4 + 34 + 1 + hello[4 + 34]
    extensions = suites + 2 + int.from_bytes(hello[suites:suites + 2], "big") + 2
    extra = b"\xfe\x0d\x00\x04\x00\x00\x00\x00"
    length = int.from_bytes(hello[extensions:extensions + 2], "big") + len(extra)
    hello[extensions:extensions + 2] = length.to_bytes(2, "big")
    hello += extra
    hello[1:4] = (len(hello) - 4).to_bytes(3, "big")
    return record[:3] + len(hello).to_bytes(2, "big") + bytes(hello)


def pieces(name, how):
    record = client_hello(None if how == "nameless" else name)
    if how == "ech":
        record = with_ech(record)
    if how in ("bytes", "slow"):
        # The name lies in the first part; single bytes of the rest would only take time.
        return [bytes([byte]) for byte in record[:250]] + [record[250:]]
    if how == "records":
        body, half = record[5:], 40
        parts = [body[:half], body[half:]]
        return [record[:3] + len(part).to_bytes(2, "big") + part for part in parts]
    return [record]


def outcome(attempt):
    start = time.monotonic()
    try:
        text = attempt()
    except OSError as error:
        text = type(error).__name__
    print(text, round((time.monotonic() - start) * 1000), flush=True)


def exchange(ip, port, parts, pause=0.0):
    with socket.create_connection((ip, int(port)), 20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        answer = connection.recv(4096)
    if not answer:
        return "closed"
    return "alert" if answer[0] == 21 else "answered"


def second(ip, first, name, how):
    with socket.create_connection((ip, 9000), 20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if how == "at once":
            record = client_hello(first)
            both = record[5:] + client_hello(name)[5:]
            connection.sendall(record[:3] + len(both).to_bytes(2, "big") + both)
        else:
            connection.sendall(client_hello(first))
            time.sleep(0.1)
            connection.sendall(b"\x14\x03\x03\x00\x01\x01")
            for part in pieces(name, how):
                connection.sendall(part)
        connection.shutdown(socket.SHUT_WR)
        return "closed" if not connection.recv(1) else "answered"


def datagram(ip, port):
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.settimeout(5)
        client.connect((ip, int(port)))
        client.send(b"\x12\x34\x01\x00\x00\x01" + bytes(6) + b"\x01a\x04test\x00\x00\x01\x00\x01")
        return "answered" if client.recv(512) else "closed"


def files(ip, port, *names):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.settimeout(5)
        client.connect((ip, int(port)))
        for name in names:
            with open(name, "rb") as file:
                client.send(file.read())
        return "answered " + ",".join(str(len(client.recv(1 << 16))) for _ in names)


def main(mode, *words):
    if mode == "serve":
        serve(*words)
    elif mode == "hello":
        ip, name, how = words
        pause = 0.1 if how == "slow" else 0
        outcome(lambda: exchange(ip, 443, pieces(name, how), pause))
    elif mode == "second":
        outcome(lambda: second(*words))
    elif mode == "send":
        ip, port, text = words
        outcome(lambda: exchange(ip, port, [text.encode().decode("unicode_escape").encode()]))
    elif mode == "files":
        outcome(lambda: files(*words))
    elif mode == "datagram":
        outcome(lambda: datagram(*words))


main(*sys.argv[1:])
