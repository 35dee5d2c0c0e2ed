# Network cards on `ringfence vhost-user net` (devices-host.sh): `eth0` is on a switch with the guest `peer` of
# `ringfence run`, `eth1` on the network of the host.

MACHINE=10.77.0.2
PEER=10.77.0.3
# Server outside of the host.
OUTSIDE_SERVER=198.51.100.1
# Length of a stream in MiB, which `--set` changes.
STREAM=${STREAM:-24}

# use_cards: checks that the machine has both cards, and gives `eth0` its address.
use_cards() {
    load_modules virtio_net
    check 'the cards are there' wait_for 10 test -e /sys/class/net/eth1 || give_up 'no cards'
    ip address add $MACHINE/24 dev eth0
    ip link set eth0 up mtu 9000
    check 'the guest of `run` answers' wait_for 20 ping -c 1 -W 5 $PEER || give_up 'no network'
}

# counters DIRECTION: prints bytes and frames of the machine's card, `tx` or `rx`. peer_counters: those of the other guest.
counters() { cat /sys/class/net/eth0/statistics/$1_bytes /sys/class/net/eth0/statistics/$1_packets; }
peer_counters() { on_host peer cat /sys/class/net/eth0/statistics/$1_bytes /sys/class/net/eth0/statistics/$1_packets; }

# check_whole LABEL MTU BEFORE AFTER: checks by two states of counters that frames were longer than the MTU on average, which
# only super-packets are.
check_whole() {
    local length
    # Words on purpose.
    # shellcheck disable=SC2086
    length=$(echo $3 $4 | awk '{ print int(($3 - $1) / ($4 - $2 + 1)) }')
    note "$1: $length bytes a frame, MTU $2"
    check "$1 takes super-packets whole (MTU $2)" test $length -gt $(($2 + 14))
}

# peer_has_received NUMBER: succeeds if the other guest has received as many streams.
peer_has_received() { test $(wc -l </share/peer.out) -ge $1; }

# check_streams MTU: checks a stream in each direction by its hash, and that super-packets pass whole.
check_streams() {
    local mtu=$1 streams here there
    ip link set eth0 mtu $mtu
    streams=$(wc -l </share/peer.out) here=$(counters tx) there=$(peer_counters rx)
    check "a stream is sent (MTU $mtu)" traffic send $PEER 7004 $STREAM
    check "it arrives (MTU $mtu)" wait_for 20 peer_has_received $((streams + 1))
    is "all of it (MTU $mtu)" "$(tail -n 1 /share/peer.out)" "$(traffic sum $STREAM)"
    check_whole 'the card' $mtu "$here" "$(counters tx)"
    check_whole 'the other guest' $mtu "$there" "$(peer_counters rx)"
    start_receiver 7002
    here=$(counters rx) there=$(peer_counters tx)
    check "a stream is sent back (MTU $mtu)" on_host peer traffic send $MACHINE 7002 $STREAM
    is "all of it arrives (MTU $mtu)" "$(received_stream 7002)" "$(traffic sum $STREAM)"
    check_whole 'the other guest, back,' $mtu "$there" "$(peer_counters tx)"
    check_whole 'the card, back,' $mtu "$here" "$(counters rx)"
}

# exchange: exchanges data with the other guest.
exchange() { traffic many $PEER 7003 10 128; }

# check_kills_of_card NAME: checks that a connection survives three kills of this one of the card's processes.
check_kills_of_card() {
    local pulse killed=0
    traffic pulse $PEER 7003 20 >/tmp/pulse 2>&1 &
    pulse=$!
    while [ $killed -lt 3 ]; do
        wait_for 20 exchange && on_host kill $1 || break
        killed=$((killed + 1))
    done
    is "$1 was killed" "$killed times" '3 times'
    check "it serves again ($1)" wait_for 20 exchange
    check "a connection of before continues ($1)" wait $pulse
    note "$1: echoes, and the longest pause in ms: $(cat /tmp/pulse)"
}

# check_uplink: checks the card on the network of the host.
check_uplink() {
    mkdir -p /etc
    ip link set eth1 up
    check 'DHCP gives the other card a lease' udhcpc -i eth1 -n -q -t 10 -s /vm/linux/on-lease
    check 'a server outside of the host returns data' traffic many $OUTSIDE_SERVER 7003 10 512
    is 'and serves a file by HTTP' "$(wget -q -O - http://$OUTSIDE_SERVER/noise | sha256sum)" "$(sha256sum </share/noise)"
}

# check_cards: all of these checks, and those of the features.
check_cards() {
    use_cards
    check 'checksums and super-packets are left to the other side' features_are_negotiated 0 1 7 8 11 12
    check 'buffers are merged, and notifications requested by index' features_are_negotiated 15 29
    check_streams 9000
    check_streams 1500
    check 'datagrams of every length' traffic datagrams $PEER 7005 100
    check_kills_of_card card
    check_uplink
}
