#!/bin/sh
# scenario.sh SUITE SCENARIO: runs one scenario, with all that it may use.

set -u
path=$PATH
. /vm/lib/both.sh
. /vm/lib/checks.sh
PATH=$path
PATIENCE=1
usleep() { sleep 0.1; }

# outside COMMAND...: runs a command in the outside network.
outside() { python3 /clients/peer.py outside /run/outside 0 "$*"; }
# tcp ADDRESS PORT [LENGTH], udp ADDRESS PORT [LENGTH]: exchanges data with a server, and prints the client's address.
tcp() { python3 /clients/peer.py tcp "$@"; }
udp() { python3 /clients/peer.py udp "$@"; }
# Prints the process ids of networks, of whichever program.
networks() { pgrep -f '^(ringfence internal|[^ ]*(pasta|pasta.avx2|passt|passt.avx2|slirp4netns|ringfence)) '; }
none_left() { ! networks; }

# is_ringfence: whether `pasta` is Ringfence's.
is_ringfence() { pasta --version | grep -q Ringfence; }

cd "$HOME" || exit 1
# A scenario may be for another kind of network than pasta.
net=$(sed -n 's/^# net: //p' "/clients/$1/$2.sh")
. "/clients/$1/lib.sh"
. "/clients/$1/$2.sh"
