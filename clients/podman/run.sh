# title: a container reaches the outside: addresses, both families, TCP, UDP, names, ping; its network ends with it
# limit: 60

check 'a container runs' run true || give_up 'no container'
is 'its status is returned' "$(run 'exit 7' >/dev/null 2>&1; echo $?)" 7
has() { run "ip -o address show scope global" | grep -q "$1"; }
check 'it has the IPv4 address of the host' has 192.0.2.2/24
check 'and the IPv6 address' has 2001:db8:1::2/64
check 'its interface has the name of that of the host' sh -c "podman run --rm base ip -o link | grep -q wan0"
check 'its /etc/hosts has the address' sh -c "podman run --rm --name one --hostname one base cat /etc/hosts | grep -q '^192.0.2.2.*one'"
is 'a server outside is reached by IPv4' "$(run 'tcp 198.51.100.1 7000 3000000')" 'client 192.0.2.2'
is 'and by IPv6' "$(run 'tcp 2001:db8:ffff::1 7000 3000000')" 'client 2001:db8:1::2'
is 'datagrams come back by IPv4' "$(run 'udp 198.51.100.1 7000')" 'client 192.0.2.2'
is 'and by IPv6' "$(run 'udp 2001:db8:ffff::1 7000')" 'client 2001:db8:1::2'
is 'a long datagram comes back' "$(run 'udp 198.51.100.1 7000 30000')" 'client 192.0.2.2'
check 'a name leads to a server' run 'tcp www.far.test 7000'
check_not 'another name has no address' run 'tcp none.far.test 7000'
check 'a host outside is pinged' run 'ping -c 1 -W 5 198.51.100.1'
check_not 'a closed port is refused' run 'python3 -c "import socket; socket.create_connection((\"198.51.100.1\", 9), 5)"'
check 'the network ends with the container' wait_for 5 none_left
complete_scenario
