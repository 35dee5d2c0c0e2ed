# A network card on `ringfence passt`, for scenarios of every transport.

# check_card [IPV4 IPV6]: checks DHCP, router advertisements, DNS, ping, TCP and UDP in both directions, and a short
# MTU. The host's servers are at these addresses.
check_card() {
    local to server=${1:-192.0.2.80} server6=${2:-2001:db8:1::80}
    load_modules virtio_net
    check 'the card is there' wait_for 5 test -e /sys/class/net/eth0 || give_up 'no card'
    mkdir -p /etc
    ip link set eth0 up
    check 'DHCP gives a lease' udhcpc -i eth0 -n -q -t 10 -s /vm/linux/on-lease || give_up 'no address'
    is 'it is the address of the host' "$(cat /tmp/lease)" '192.0.2.2/24 mtu 65520 router 192.0.2.1'
    has_ipv6() { ip -6 address show dev eth0 scope global | grep -q 2001:db8:1:; }
    check 'router advertisements give an IPv6 address' wait_for 10 has_ipv6
    check 'and a router' wait_for 10 sh -c 'ip -6 route | grep -q "^default.*eth0"'
    check 'a name has an address' sh -c 'nslookup host.test | grep -q 192.0.2.80'
    check_not 'another name has none' nslookup other.test
    check 'the loopback of the host is pinged' ping -c 2 -W 5 $server
    for to in 4/$server 6/$server6; do
        check "a stream is sent by IPv${to%%/*}" traffic send ${to#*/} 700${to%%/*} 24
        wait_for 10 test -s /share/sent-${to%%/*}
        is "all of it arrived (IPv${to%%/*})" "$(cat /share/sent-${to%%/*})" "$(traffic sum 24)"
    done
    start_receiver 7002
    touch /share/listens
    is 'a stream arrives by a forwarded port' "$(received_stream 7002)" "$(traffic sum 24)"
    check 'a hundred connections at a time' traffic many $server 7003 100 32
    check 'datagrams of every length' traffic datagrams $server 7005 100
    ip link set eth0 mtu 1500
    check 'a short MTU' traffic many $server6 7003 10 512
}

# scan_passt: prints the result of a search for a secret in the memory of passt while data pass.
scan_passt() {
    hide_secret
    scan passt traffic many 192.0.2.80 7003 10 128
}
