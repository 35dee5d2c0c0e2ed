# title: passt's tests of pasta: DHCP, NDP, DNS, ping, transfers, MTU, ports, both stacks
# limit: 120

inside -t 8080:80,8082:82 -u 8080:80,8082:82
is '50 MB from outside by TCP and IPv4' "$(outside tcp 192.0.2.2 8080 50000000)" 'client 192.0.2.1'
is '50 MB from outside by TCP and IPv6' "$(outside tcp 2001:db8:1::2 8082 50000000)" 'client 2001:db8:1::1'
check '50 MB from the loopback by TCP and IPv4' tcp 127.0.0.1 8080 50000000
check '50 MB from the loopback by TCP and IPv6' tcp ::1 8082 50000000
is 'a datagram from outside by IPv4' "$(outside udp 192.0.2.2 8080 8000)" 'client 192.0.2.1'
is 'a datagram from outside by IPv6' "$(outside udp 2001:db8:1::2 8082 8000)" 'client 2001:db8:1::1'
kill "$(cat pasta.pid)"
check 'pasta ends' wait_for 5 none_left
complete_scenario
