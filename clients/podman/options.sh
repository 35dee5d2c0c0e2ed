# title: options after --network=pasta: addresses, MTU, interface, one family, ports towards the host, the gateway
# limit: 60

is 'an address of its own' "$(run 'ip -o -4 address show scope global' --network pasta:-a,10.9.0.5,-n,24,-g,10.9.0.1 | grep -o '10.9.0.5/24')" 10.9.0.5/24
is 'with it, the outside is reached' "$(run 'tcp 198.51.100.1 7000' --network pasta:-a,10.9.0.5,-n,24,-g,10.9.0.1)" 'client 192.0.2.2'
check 'an MTU' sh -c "podman run --rm --network pasta:--mtu,1400 base ip -o link | grep -q 'mtu 1400'"
check 'a name of the interface' sh -c "podman run --rm --network pasta:-I,foo0 base ip -o link | grep -q foo0"
check 'only IPv4' sh -c "! podman run --rm --network pasta:--ipv4-only base ip -6 -o address show scope global | grep -q 2001"
check 'only IPv6' sh -c "! podman run --rm --network pasta:--ipv6-only base ip -4 -o address show scope global | grep -q 192"
is 'a port towards the loopback of the host' "$(run 'tcp 127.0.0.1 7001' --network pasta:-T,7001)" 'client 127.0.0.1'
is 'an address for the loopback of the host' "$(run 'tcp 169.254.9.9 7001' --network pasta:--map-host-loopback,169.254.9.9)" 'client 127.0.0.1'
# Podman does not pass --map-gw on, it only leaves out --no-map-gw: docs/pasta.md.
to_gateway() { run 'timeout 8 python3 /clients/peer.py tcp 192.0.2.1 7001' --network pasta:--map-gw; }
if is_ringfence; then
    check_not 'the gateway does not lead to the loopback of the host' to_gateway
else
    check 'the gateway leads to the loopback of the host' to_gateway
fi
is 'ports of pasta itself' "$(start 'serve :: 80' --name web --network pasta:-t,8080:80 >/dev/null; outside tcp 192.0.2.2 8080)" 'client 192.0.2.1'
remove web >/dev/null
check_not 'an unknown option is an error' run true --network pasta:--no-such-option
check 'without network' run '! ip -o address show scope global | grep -q .' --network none
complete_scenario
