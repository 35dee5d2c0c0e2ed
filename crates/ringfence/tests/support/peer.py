"""The two ends of what tests send: peer.py MODE ADDRESS PORT."""
import errno
import fcntl
import hashlib
import os
import select
import socket
import struct
import sys
import termios
import threading
import time

NOISE = "noise"


def say(*words):
    """A line by one write: those of processes that share a pipe stay whole."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def noise():
    with open(NOISE, "rb") as file:
        return file.read()


def connect(address, port):
    """A server may still be starting."""
    for _ in range(200):
        try:
            return socket.create_connection((address, port), 60)
        except ConnectionRefusedError:
            time.sleep(0.1)
    raise SystemExit(f"nobody listens at {address} {port}")


def exchange(connection):
    """Hears until the end, answers with the hash, then sends the noise back."""
    digest = hashlib.sha256()
    while octets := connection.recv(1 << 18):
        digest.update(octets)
    connection.sendall(digest.hexdigest().encode() + b"\n" + noise())
    connection.close()


def tcp_server(address, port):
    server = socket.socket(family(address), socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((address, port))
    server.listen(64)
    say("listening")
    while True:
        connection, client = server.accept()
        say("client", client[0])
        threading.Thread(target=exchange, args=(connection,), daemon=True).start()


def tcp_client(address, port, silence=0):
    """Sends the noise and the end, hears the hash of it, and the noise."""
    connection = connect(address, port)
    time.sleep(silence)
    send_and_hear(connection)


def tcp_client_held(address, port):
    """Connects, and sends only once there is a file `go`."""
    connection = connect(address, port)
    say("connected")
    while not os.path.exists("go"):
        time.sleep(0.05)
    send_and_hear(connection)


def send_and_hear(connection):
    connection.settimeout(60)
    sent = noise()
    connection.sendall(sent)
    connection.shutdown(socket.SHUT_WR)
    parts = []
    while octets := connection.recv(1 << 18):
        parts.append(octets)
    digest, back = b"".join(parts).split(b"\n", 1)
    expected = hashlib.sha256(sent).hexdigest()
    assert digest.decode() == expected, "the server heard something else"
    assert hashlib.sha256(back).hexdigest() == expected, f"{len(back)} octets came back, otherwise"
    say("equal", expected)


def tcp_clients_late(address, port):
    """Several that say nothing for longer than a TAP remembers by which queue they are answered."""
    threads = [threading.Thread(target=tcp_client, args=(address, port, 4)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def hear(connection, pause=0):
    """Hears until the end, with a pause after the first bytes, and answers with the hash."""
    digest = hashlib.sha256()
    while octets := connection.recv(1 << 18):
        digest.update(octets)
        time.sleep(pause)
        pause = 0
    connection.sendall(digest.hexdigest().encode())
    connection.close()


def small_server(address, port, buffer=4096, pause=0):
    """Offers windows of about half of `buffer`, as devices with little memory do."""
    server = socket.socket(family(address), socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if buffer:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    server.bind((address, port))
    server.listen(64)
    say("listening")
    while True:
        connection, _ = server.accept()
        threading.Thread(target=hear, args=(connection, pause), daemon=True).start()


def tcp_sink(address, port):
    """Hears as fast as it can."""
    small_server(address, port, 0)


def tiny_server(address, port):
    """Offers windows of a few hundred bytes."""
    small_server(address, port, 1024)


def pausing_server(address, port):
    """Hears nothing for four seconds, then the rest."""
    small_server(address, port, 0, 4)


def kernel_counter(table, name):
    """A counter of the kernel about this network namespace."""
    with open(f"/proc/self/net/{table}") as file:
        lines = [line.split() for line in file]
    for names, values in zip(lines[::2], lines[1::2]):
        if name in names:
            return int(values[names.index(name)])
    raise SystemExit(f"the kernel has no {name}")


def sender(address, port):
    """Sends the noise, hears the hash of it, and tells how often the kernel here has sent again what was lost."""
    connection = connect(address, port)
    start = time.monotonic()
    connection.settimeout(120)
    connection.sendall(noise())
    connection.shutdown(socket.SHUT_WR)
    heard = b""
    while octets := connection.recv(1 << 18):
        heard += octets
    assert heard.decode() == hashlib.sha256(noise()).hexdigest(), "the server heard something else"
    say(f"equal after {time.monotonic() - start:.3f} s")
    say("timeouts", kernel_counter("netstat", "TCPTimeouts"))
    say("repeated", kernel_counter("snmp", "RetransSegs"))


def udp_server(address, port):
    server = socket.socket(family(address), socket.SOCK_DGRAM)
    server.bind((address, port))
    say("listening")
    while True:
        octets, client = server.recvfrom(65536)
        say("client", client[0])
        server.sendto(octets, client)


def marks_server(address, port):
    """Answers datagrams and connections with the traffic class and the hop limit by which they came."""
    v6 = family(address) == socket.AF_INET6
    level, class_option, hops_option = (41, 66, 51) if v6 else (0, 13, 12)
    server = socket.socket(family(address), socket.SOCK_DGRAM)
    server.setsockopt(level, class_option, 1)
    server.setsockopt(level, hops_option, 1)
    server.setsockopt(level, 67 if v6 else 1, 0x6B)
    server.bind((address, port))
    say("listening")
    while True:
        octets, found, _, client = server.recvmsg(65536, 256)
        marks = [data[0] for _, _, data in sorted(found, key=lambda one: one[1])]
        server.sendto(f"{len(octets)} {sorted(marks)}".encode(), client)


def marks_client(address, port):
    """Sends with a traffic class and a hop limit, and tells what arrived."""
    v6 = family(address) == socket.AF_INET6
    level, class_option, hops_option = (41, 67, 16) if v6 else (0, 1, 2)
    client = socket.socket(family(address), socket.SOCK_DGRAM)
    client.connect((address, port))
    client.settimeout(30)
    client.setsockopt(level, 66 if v6 else 13, 1)
    for traffic_class, hops in [(0xB9, 33), (0, 64)]:
        client.setsockopt(level, class_option, traffic_class)
        client.setsockopt(level, hops_option, hops)
        client.send(b"x")
        octets, found, _, _ = client.recvmsg(100, 256)
        say("marks", octets.decode(), "answer", *[data[0] for _, _, data in found])


def tcp_marks_server(address, port):
    """Tells the DSCP of each segment with payload that arrives at one connection, without repetitions."""
    server = socket.socket(family(address), socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((address, port))
    server.listen()
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0x0300)
    wire.settimeout(0.5)
    say("listening")
    connection, _ = server.accept()
    with connection:
        while connection.recv(1 << 16):
            pass
    found = []
    try:
        while True:
            packet, (_, protocol, direction, *_) = wire.recvfrom(1 << 16)
            v6 = protocol == 0x86DD
            # An ARP packet may have any byte in the place of the protocol.
            if direction == socket.PACKET_OUTGOING or protocol not in (0x0800, 0x86DD):
                continue
            if packet[6 if v6 else 9] != 6:
                continue
            traffic_class = (packet[0] << 4 | packet[1] >> 4) & 0xFF if v6 else packet[1]
            segment = packet[40 if v6 else 20 :]
            has_payload = len(segment) > (segment[12] >> 4) * 4
            if has_payload and segment[2:4] == port.to_bytes(2, "big"):
                found.append(traffic_class >> 2)
    except TimeoutError:
        pass
    say("dscp", *[now for before, now in zip([None] + found, found) if now != before])


def tcp_marks_client(address, port):
    """Chooses a DSCP before it connects, and another one later."""
    v6 = family(address) == socket.AF_INET6
    level, option = (41, 67) if v6 else (0, 1)
    client = socket.socket(family(address), socket.SOCK_STREAM)
    client.setsockopt(level, option, 10 << 2)
    client.connect((address, port))
    for dscp in (10, 46, 0):
        client.setsockopt(level, option, dscp << 2)
        client.sendall(b"x" * 100)
        # The next segment begins after the uplink has acknowledged this one.
        while struct.unpack("i", fcntl.ioctl(client, termios.TIOCOUTQ, bytes(4)))[0]:
            time.sleep(0.05)
        time.sleep(0.3)
    client.close()


def path_mtu(address, port):
    """Finds the longest datagram that is answered, and the MTU that the kernel knows of after that."""
    v6 = family(address) == socket.AF_INET6
    level, option, known, headers = (41, 23, 24, 48) if v6 else (0, 10, 14, 28)
    for mode in (2, 3):
        client = socket.socket(family(address), socket.SOCK_DGRAM)
        # IP_PMTUDISC_DO, IP_PMTUDISC_PROBE
        client.setsockopt(level, option, mode)
        client.connect((address, port))
        # The kernel reports a datagram that is too long at once; a busy machine delays an answer.
        client.settimeout(2)

        def is_answered(length):
            for _ in range(3):
                try:
                    client.send(bytes(length))
                    while True:
                        if len(client.recv(65536)) == length:
                            return True
                except OSError:
                    pass
            return False

        assert any(is_answered(10) for _ in range(20)), f"nobody answers at {address}"
        # What leaves within a millisecond of the first datagram may have been sent before it.
        time.sleep(0.05)
        low, high = 1000, 9000
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if is_answered(middle) else (low, middle - 1)
        say("path", mode, low + headers, client.getsockopt(level, known))


def udp_long(address, port):
    """A program that does not ask about the path, with a long datagram first."""
    udp_client(address, port, (9000, 20001, 1))


def path_mtu_alone(address, port):
    """The first datagram of a program that asks about the path, at a socket without a peer, is one that is too long."""
    client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    client.setsockopt(0, 10, 3)
    client.setsockopt(0, 11, 1)
    client.settimeout(5)
    client.sendto(bytes(9000), (address, port))
    if not is_reported(client, 10000):
        raise SystemExit("no report")
    say_report(client)


def is_reported(client, milliseconds):
    """Waits for an error report, and returns True if one has come."""
    poller = select.poll()
    poller.register(client, 0)
    return bool(poller.poll(milliseconds))


def say_report(client):
    """Tells the error report that has arrived."""
    _, found, _, _ = client.recvmsg(65536, 512, socket.MSG_ERRQUEUE)
    for _, kind, data in found:
        if kind in (11, 25):
            error, _, kind, code, _, info = struct.unpack_from("=IBBBBI", data)
            family = struct.unpack_from("=H", data, 16)[0]
            at = data[20:24] if family == socket.AF_INET else data[24:40]
            reporter = socket.inet_ntop(family, at) if family else "nobody"
            say("report", errno.errorcode[error], kind, code, info, reporter)


def reports(addresses, port):
    """Tells the reports about datagrams to each address. The last one has but one hop to go."""
    addresses = addresses.split(",")
    for address in addresses:
        v6 = family(address) == socket.AF_INET6
        client = socket.socket(family(address), socket.SOCK_DGRAM)
        client.setsockopt(41 if v6 else 0, 25 if v6 else 11, 1)
        client.setsockopt(41 if v6 else 0, 16 if v6 else 2, 1 if address == addresses[-1] else 64)
        # Linux 6.1 gives one address a report about a route each second, whatever icmp_ratelimit says.
        for _ in range(10):
            client.sendto(b"x", (address, port))
            if is_reported(client, 1500):
                break
        else:
            raise SystemExit("no report")
        say_report(client)


def udp_mirror(address, port):
    """Answers each datagram with the port of its sender, after one from another port, which must not arrive."""
    server = socket.socket(family(address), socket.SOCK_DGRAM)
    other = socket.socket(family(address), socket.SOCK_DGRAM)
    server.bind((address, port))
    other.bind((address, 0))
    say("listening")
    while True:
        _, client = server.recvfrom(65536)
        other.sendto(b"0", client)
        server.sendto(b"%d" % client[1], client)


def udp_identity(addresses, port):
    """Sends to several mirrors from one port, and tells the ports by which they know it."""
    known, strangers = set(), 0
    client = socket.socket(family(addresses), socket.SOCK_DGRAM)
    client.bind(("", 41641))
    # An answer that comes after the next question would count for another address.
    client.settimeout(10)
    for address in addresses.split(",") * 2:
        for _ in range(10):
            client.sendto(b"x", (address, port))
            try:
                octets, sender = client.recvfrom(65536)
            except TimeoutError:
                continue
            if octets == b"0":
                strangers += 1
                octets, sender = client.recvfrom(65536)
            assert sender[0] == address, sender
            known.add(octets.decode())
            break
        else:
            raise SystemExit(f"{address} never answered")
    say("known by", *sorted(known))
    say("strangers", strangers)


def udp_client(address, port, lengths=(0, 1, 64, 1200, 1452, 1473, 9000, 20001, 65000)):
    """Each datagram comes back as it was; one that is lost is sent again."""
    client = socket.socket(family(address), socket.SOCK_DGRAM)
    client.connect((address, port))
    client.settimeout(2)
    octets = noise()
    for length in lengths:
        sent = length.to_bytes(4, "big") + octets[: max(length - 4, 0)]
        for _ in range(10):
            client.send(sent)
            try:
                if client.recv(65536) == sent:
                    break
            except TimeoutError:
                pass
        else:
            raise SystemExit(f"{length} octets never came back")
    say("equal")


def query(address, port):
    """Asks a name server for the IPv4 address of www.far.example, and prints the end of the answer."""
    name = b"".join(bytes([len(label)]) + label for label in [b"www", b"far", b"example"]) + b"\0"
    client = socket.socket(family(address), socket.SOCK_DGRAM)
    client.connect((address, port))
    client.settimeout(2)
    client.send(b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0" + name + b"\0\x01\0\x01")
    answer = client.recv(512)
    if answer[3] & 15 or not answer[7]:
        raise SystemExit("the name is unknown")
    say("address", socket.inet_ntoa(answer[-4:]))


def refused(address, port):
    """That nobody can be reached there."""
    try:
        socket.create_connection((address, port), 3)
    except OSError as error:
        say("refused", error)
        return
    raise SystemExit(f"{address} {port} was reached")


def unserved(address, port):
    """That no server answers there, although the connection may be accepted first."""
    heard = b""
    try:
        connection = socket.create_connection((address, port), 10)
        connection.sendall(b"x")
        connection.shutdown(socket.SHUT_WR)
        heard = connection.recv(1)
    except OSError as error:
        say("refused", error)
        return
    if heard:
        raise SystemExit(f"{address} {port} was reached")
    say("refused", "without an answer")


def udp_unserved(address, port):
    """That no datagram is answered there."""
    client = socket.socket(family(address), socket.SOCK_DGRAM)
    client.connect((address, port))
    client.settimeout(1)
    for _ in range(3):
        try:
            client.send(b"x")
            client.recv(1)
        except OSError:
            continue
        raise SystemExit(f"{address} {port} has answered")
    say("refused", "without an answer")


def several(address, port):
    """Connections at a time that also a user with few descriptors may hold."""
    many(address, port, 40)


def many(address, port, count=400):
    """Many connections at a time, all of which work."""
    held = []
    for number in range(count):
        connection = connect(address, port)
        connection.settimeout(60)
        connection.sendall(b"%d" % number)
        held.append(connection)
    length = len(noise())
    for number, connection in enumerate(held):
        connection.shutdown(socket.SHUT_WR)
        heard = b""
        while octets := connection.recv(1 << 18):
            heard += octets
        digest = hashlib.sha256(b"%d" % number).hexdigest()
        assert heard.startswith(digest.encode()), heard[:80]
        assert len(heard) == 65 + length, len(heard)
    say("equal")


mode, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
globals()[mode](address, port)
