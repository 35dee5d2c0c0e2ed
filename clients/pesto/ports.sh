# title: pesto adds, removes and lists ports of a running pasta
# limit: 60

if ! pasta --help 2>&1 | grep -q -e --conf-path || ! command -v $CLIENT >/dev/null; then
    skip 'ports change' 'this passt has no control socket'
    complete_scenario
    exit 0
fi
pasta --config-net --no-map-gw --quiet --conf-path socket -t 9000:80 -u none --pid pasta.pid -- $peer serve :: 80 >pasta.log 2>&1 &
check 'pasta starts' wait_for 10 tcp 127.0.0.1 9000 10 || give_up "$(cat pasta.log)"
reached() { wait_for 3 outside "$1" 192.0.2.2 "$2" 1000; }
refused() { wait_for 3 sh -c "! python3 -c 'import socket; socket.create_connection((\"192.0.2.2\", $1), 1)'"; }
lists() { $CLIENT socket | grep -q "$1"; }
check 'the port of the start is listed' lists 9000
check 'ports are added' $CLIENT --add -t 0.0.0.0/8080:80 -u 8080:80 socket
check 'TCP' reached tcp 8080
check 'UDP' reached udp 8080
check 'they are listed' lists 8080
check 'and the first port still works' reached tcp 9000
check 'a range without some ports is added' $CLIENT --add -t 8100-8104:80-84,~8101-8103 socket
check 'its first port' reached tcp 8100
check 'a port is removed' $CLIENT --delete -t 0.0.0.0/8080:80 socket
check 'it is refused' refused 8080
check 'UDP has stayed' reached udp 8080
check 'all ports are replaced' $CLIENT -t 8090:80 socket
check 'the new one' reached tcp 8090
check 'the first one is refused' refused 9000
kill "$(cat pasta.pid)"
complete_scenario
