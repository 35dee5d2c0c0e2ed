# title: pasta configures the namespace: addresses, routes, options for both
# limit: 60

# inner OPTION... -- COMMAND...: what a command in new namespaces writes.
inner() { timeout 20 pasta --no-map-gw --quiet --config-net "$@"; }
is 'the IPv4 address of the host' "$(inner -- ip -4 -o address show dev wan0 | awk '{print $4}')" 192.0.2.2/24
check 'its IPv6 address' sh -c "$(command -v pasta) --no-map-gw --quiet --config-net -- ip -6 -o address show dev wan0 scope global | grep -q 2001:db8:1::2/64"
is 'its router' "$(inner -- ip -4 route show default | awk '{print $3}')" 192.0.2.1
is 'its IPv6 router' "$(inner -- ip -6 route show default | awk '{print $3}')" 2001:db8:1::1
is 'an MTU of the options' "$(inner -m 1400 -- ip -o link show dev wan0 | sed 's/.* mtu \([0-9]*\) .*/\1/')" 1400
is 'a name of the options' "$(inner -I up7 -- ip -o link show | sed -n 's/.*: \(up7\): .*/\1/p')" up7
is 'an address of the options' "$(inner -a 192.0.2.77 -n 24 -- ip -4 -o address show dev wan0 | awk '{print $4}')" 192.0.2.77/24
is 'IPv4 alone' "$(inner -4 -- ip -6 -o address show scope global | wc -l)" 0
is 'IPv6 alone' "$(inner -6 -- ip -4 -o address show scope global | wc -l)" 0
is 'the exit status of the command' "$(inner -- sh -c 'exit 7'; echo $?)" 7
complete_scenario
