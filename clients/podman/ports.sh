# title: published ports: TCP, UDP, ranges, both families, bound addresses, source addresses, conflicts
# limit: 60

server='python3 /clients/peer.py serve 0.0.0.0 81 & python3 /clients/peer.py serve :: 82 & serve :: 80'
check 'a container with ports starts' start "$server" --name web -p 8080:80 -p 8082:82/udp -p 127.0.0.1:8081:80 \
    -p 9000-9002:80-82 -p 192.0.2.2:8084:80 -p 8085:80/tcp -p 8085:80/udp || give_up 'no container'
is 'from outside by IPv4, with the source address' "$(outside tcp 192.0.2.2 8080 2000000)" 'client 192.0.2.1'
is 'and by IPv6' "$(outside tcp 2001:db8:1::2 8080 2000000)" 'client 2001:db8:1::1'
is 'UDP by IPv4' "$(outside udp 192.0.2.2 8082)" 'client 192.0.2.1'
is 'UDP by IPv6' "$(outside udp 2001:db8:1::2 8082)" 'client 2001:db8:1::1'
check 'from the loopback of the host' tcp 127.0.0.1 8080
check 'and by IPv6' tcp ::1 8080
check 'by the address of the host itself' tcp 192.0.2.2 8080
check 'UDP from the loopback of the host' udp 127.0.0.1 8082
check 'the first port of a range' outside tcp 192.0.2.2 9000
check 'the last port of a range' outside tcp 192.0.2.2 9002
check 'a port bound to the loopback answers there' tcp 127.0.0.1 8081
check_not 'and not outside' outside timeout 5 python3 /clients/peer.py tcp 192.0.2.2 8081
check 'a port bound to an address answers there' outside tcp 192.0.2.2 8084
check 'one number of both protocols: TCP' outside tcp 192.0.2.2 8085
check 'one number of both protocols: UDP' outside udp 192.0.2.2 8085
check_not 'a port that is taken is an error' run true -p 8080:80
podman port web >ports
check 'podman lists the ports' grep -q '80/tcp -> 0.0.0.0:8080' ports
remove web >/dev/null
check 'a container with a port at the IPv6 loopback starts' start 'serve :: 80' --name web -p '[::1]:8083:80'
check 'it answers there' tcp ::1 8083
remove web >/dev/null
is 'the ports are free again' "$(run 'echo ran' -p 8080:80)" ran
complete_scenario
