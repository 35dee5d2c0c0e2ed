# title: a command reaches the outside by the network of pasta; the loopback of the host
# limit: 60

is 'it has the address' "$(kit ip -o -4 address show tap0 | grep -o '10.0.2.100/24')" 10.0.2.100/24
is 'a server outside is reached' "$(kit $peer tcp 198.51.100.1 7000 2000000)" 'client 192.0.2.2'
is 'datagrams come back' "$(kit $peer udp 198.51.100.1 7000)" 'client 192.0.2.2'
check 'a name leads to a server' kit $peer tcp www.far.test 7000
is 'its status is returned' "$(kit sh -c 'exit 7' >/dev/null 2>&1; echo $?)" 7
# Ringfence opens the host only by an option, which RootlessKit does not pass: docs/pasta.md.
to_loopback() { kit timeout 8 $peer tcp 10.0.2.2 7001; }
if is_ringfence; then
    check_not 'the gateway does not lead to the loopback of the host' to_loopback
else
    check 'the gateway leads to the loopback of the host' to_loopback
fi
check_not 'but not with --disable-host-loopback' kit --disable-host-loopback timeout 8 $peer tcp 10.0.2.2 7001
check 'the network ends with the command' wait_for 10 none_left
complete_scenario
