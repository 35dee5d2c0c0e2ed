# title: published ports of a user network by pesto (Podman 6 with rootless_port_forwarder)
# limit: 60

case "$(podman --version)" in
    *' version '[1-5].*)
        skip 'ports by pesto' 'Podman 6 is needed: --podman FOLDER'
        complete_scenario
        exit 0
        ;;
esac
echo 'rootless_port_forwarder = "pasta"' >>~/.config/containers/containers.conf
podman network create --ipv6 net >/dev/null
server='python3 /clients/peer.py serve 0.0.0.0 81 & serve :: 80'
check 'a container with ports starts' start "$server" --name web --network net -p 8080:80 -p 8082:80/udp || give_up 'no container'
note "$(pgrep -af '(pasta|ringfence).* (-c|--conf-path) ' | cut -c1-300)"
is 'from outside by IPv4, with the source address' "$(outside tcp 192.0.2.2 8080 2000000)" 'client 192.0.2.1'
is 'UDP by IPv4' "$(outside udp 192.0.2.2 8082)" 'client 192.0.2.1'
check 'from the loopback of the host' tcp 127.0.0.1 8080
check 'a second container adds a port' start 'serve :: 80' --name two --network net -p 8090:80
check 'it is reached' outside tcp 192.0.2.2 8090
remove web two >/dev/null
check 'the network ends with the containers' wait_for 10 none_left
complete_scenario
