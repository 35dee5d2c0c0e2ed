# title: the port driver `pesto`, with the source address
# limit: 60

skip_all() {
    for each in 1 2 3 4 5 6 7; do skip "check $each" "$1"; done
    complete_scenario
    exit 0
}
$CLIENT --help | grep -q 'pesto' || skip_all 'this version of RootlessKit has no such driver'
command -v pesto >/dev/null || skip_all 'this passt has no pesto'
check 'it starts' start --port-driver=pesto --publish 0.0.0.0:8080:80/tcp --publish 0.0.0.0:8080:80/udp $peer serve 0.0.0.0 80 ||
    give_up "$(tail -n 3 kit.log)"
is 'TCP from outside' "$(outside tcp 192.0.2.2 8080)" 'client 192.0.2.1'
is 'UDP from outside' "$(outside udp 192.0.2.2 8080)" 'client 192.0.2.1'
check 'TCP from the loopback of the host' tcp 127.0.0.1 8080
check 'a port is added' pesto --add -t 0.0.0.0/8081:80 state/.pasta.sock
is 'it leads to the server' "$(outside tcp 192.0.2.2 8081)" 'client 192.0.2.1'
check 'it ends' stop
complete_scenario
