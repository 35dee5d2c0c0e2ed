# title: --network slirp4netns, as Podman before 5.0 has it by default
# limit: 40
# also: podman-4

note "$(podman info --format '{{.Host.Slirp4NetNS.Executable}}: {{.Host.Slirp4NetNS.Version}}' | head -n 1)"
net='--network slirp4netns'
is 'its address' "$(run 'ip -4 -o address show dev tap0' $net | awk '{print $4}')" 10.0.2.100/24
is 'a server outside sees the address of the host' "$(run 'tcp 198.51.100.1 7000 2000000' $net)" 'client 192.0.2.2'
check 'datagrams come back' run 'udp 198.51.100.1 7000' $net
check 'a name leads to a server' run 'tcp www.far.test 7000' $net
check_not 'the loopback of the host is not reached' run 'timeout 5 python3 /clients/peer.py tcp 10.0.2.2 7001' $net
check 'a container with a port starts' start 'serve 0.0.0.0 80' --name web -p 8080:80 --network slirp4netns:port_handler=slirp4netns
is 'the port shows the address of its client' "$(outside tcp 192.0.2.2 8080)" 'client 192.0.2.1'
remove web >/dev/null
check 'the network ends with the container' wait_for 10 none_left
complete_scenario
