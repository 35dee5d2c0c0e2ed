# title: cards on `vhost-user net`, on a switch with a guest of `run` and on an uplink: data, super-packets, kills, a secret is seen
# set: all
# group: vhost-user-net
# machine: linux-vhost-user-net
# limit: 180

. /vm/linux/net.sh
check_cards
# For comparison with `lent-pool-net`.
hide_secret
check_seen 'the card' "$(scan card exchange)"
check_kernel
complete_scenario
