# Network of a host whose guests are tested: for vm/linux/passt-host.sh and clients/host.sh.

# host_network [PID]: makes `wan0`, with the addresses of the host and a router at the other end, `out0`. That is in the network
# namespace of process PID, or in this one. Nothing leaves these namespaces.
host_network() {
    ip link set lo up
    if [ -n "${1:-}" ]; then
        ip link add wan0 type veth peer name out0 netns $1
    else
        ip link add wan0 type veth peer name out0
        ip link set out0 up
    fi
    echo 0 >/proc/sys/net/ipv6/conf/wan0/accept_dad
    ip address add 192.0.2.2/24 dev wan0
    ip address add 2001:db8:1::2/64 dev wan0 nodad
    ip link set wan0 up
    ip route add default via 192.0.2.1
    ip -6 route add default via 2001:db8:1::1
}
