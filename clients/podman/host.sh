# title: the host from a container: host.containers.internal, and nothing else of it
# limit: 60

python3 /clients/peer.py serve :: 7002 &
is 'the name leads to the address of the host' "$(run 'tcp host.containers.internal 7002' 2>&1 | cut -d' ' -f1)" client
check 'so does host.docker.internal' run 'tcp host.docker.internal 7002'
check_not 'a server at the loopback of the host is not reached by it' run 'timeout 8 python3 /clients/peer.py tcp host.containers.internal 7001'
check_not 'nor at the loopback' run 'timeout 8 python3 /clients/peer.py tcp 127.0.0.1 7001'
check_not 'nor by the address of the gateway' run 'timeout 8 python3 /clients/peer.py tcp 192.0.2.1 7001'
complete_scenario
