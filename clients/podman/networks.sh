# title: networks of netavark: names, ports by rootlessport, the outside, connect and disconnect
# limit: 90

check 'a network is made' podman network create inner || give_up 'no network'
check 'a server starts in it' start 'serve :: 80' --network inner --name web -p 8080:80
check 'a second container starts' start 'sleep 1000' --network inner --name client
check 'it finds the first one by name' sh_in client 'tcp web 80'
check 'it reaches the outside by IPv4' sh_in client 'tcp 198.51.100.1 7000 2000000'
is 'the outside sees the address of the host' "$(sh_in client 'tcp 198.51.100.1 7000')" 'client 192.0.2.2'
check 'it resolves a name outside' sh_in client 'tcp www.far.test 7000'
check 'datagrams come back' sh_in client 'udp 198.51.100.1 7000'
check 'the port leads to the server' outside tcp 192.0.2.2 8080
podman network create other >/dev/null
check 'a running container joins a second network' podman network connect other client
check 'all are removed' remove web client
check 'the network of all networks ends' wait_for 10 none_left
complete_scenario
