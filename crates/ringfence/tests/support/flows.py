"""Many conversations at a time: flows.py MODE ADDRESS PORT [NUMBER]."""
import os
import resource
import select
import socket
import sys
import time

BATCH = 200
PATIENCE = 120

_, HARD = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (HARD, HARD))


def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def until(name):
    while not os.path.exists(name):
        time.sleep(0.05)


def echo_server(address, port):
    """Sends back what each of its clients says, for as long as they live."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((address, port))
    server.listen(4096)
    poll = select.epoll()
    poll.register(server, select.EPOLLIN)
    clients = {}
    say("listening")
    while True:
        for number, _ in poll.poll():
            if number == server.fileno():
                client, _ = server.accept()
                clients[client.fileno()] = client
                poll.register(client, select.EPOLLIN)
                continue
            try:
                octets = clients[number].recv(4096)
                clients[number].sendall(octets)
            except OSError:
                octets = b""
            if not octets:
                poll.unregister(number)
                clients.pop(number).close()


def rounds(connections, word):
    """Says a word on each and hears it again; returns those on which it came."""
    moved = []
    for at in range(0, len(connections), BATCH):
        some = connections[at : at + BATCH]
        for number, connection in enumerate(some, at):
            try:
                connection.sendall(b"%s %08d" % (word, number))
            except OSError:
                pass
        for number, connection in enumerate(some, at):
            expected = b"%s %08d" % (word, number)
            heard = b""
            try:
                while len(heard) < len(expected) and (more := connection.recv(64)):
                    heard += more
            except OSError:
                pass
            if heard == expected:
                moved.append(connection)
            elif heard:
                raise SystemExit(f"{heard} instead of {expected}")
    return moved


def connections(address, port, number):
    """Makes so many, each of which works; then, told to, tries which of them still do."""
    all_of_them = []
    while len(all_of_them) < number:
        batch = [socket.socket() for _ in range(min(BATCH, number - len(all_of_them)))]
        for connection in batch:
            connection.setblocking(False)
            connection.connect_ex((address, port))
        for connection in batch:
            # A limit of the test, not of the conversation.
            connection.settimeout(PATIENCE)
            poll = select.poll()
            poll.register(connection, select.POLLOUT)
            assert poll.poll(PATIENCE * 1000), "no answer"
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            assert error == 0, os.strerror(error)
        assert len(rounds(batch, b"one")) == len(batch), "a new one does not work"
        all_of_them.extend(batch)
    say("open", number)
    until("again")
    moved = len(rounds(all_of_them, b"two"))
    say("moved", moved, "lost", number - moved)
    until("stop")


def datagrams(address, port, number):
    """A datagram to each of so many ports: a conversation each."""
    client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for at in range(number):
        try:
            client.sendto(b"x" * 64, (address, port + at % 40000))
        except OSError:
            # Of an error that came back for an earlier one.
            pass
    say("flooded")


mode, where, at, *rest = sys.argv[1:]
globals()[mode](where, int(at), *map(int, rest))
