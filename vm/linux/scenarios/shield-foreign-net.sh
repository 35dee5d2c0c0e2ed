# title: cards of passt and testpmd behind `shield`, and without it: data, kills; no secret is seen through the shield
# set: name
# group: foreign-net
# machine: linux-foreign-net
# limit: 300

. /vm/linux/foreign.sh
check_passt passt-shield
check_testpmd testpmd eth1 10.79.0
check_testpmd testpmd-direct eth3 10.80.0
hide_secret
check_unseen 'passt behind the shield' "$(scan passt exchange)"
check_seen 'the shield, which is trusted' "$(scan passt-shield exchange)"
check_unseen 'testpmd behind the shield' "$(scan_testpmd testpmd 10.79.0)"
check_seen 'testpmd without a shield' "$(scan_testpmd testpmd-direct 10.80.0)"
# The other passt gives the same address.
ip link set eth0 down
ip link set eth2 up
check 'DHCP gives a lease without a shield' udhcpc -i eth2 -n -q -t 10 -s /vm/linux/on-lease
check 'data pass without a shield' exchange
check_seen 'passt without a shield' "$(scan passt-direct exchange)"
check_kernel
complete_scenario
