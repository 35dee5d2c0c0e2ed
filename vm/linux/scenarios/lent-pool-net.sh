# title: cards on `vhost-user net --require-pool` by the module lent-pool: what `vhost-user-net` checks, and no secret is seen
# set: all
# group: vhost-user-net
# machine: linux-lent-pool-net
# driver: lent-pool
# limit: 180

. /vm/linux/net.sh
check 'the module loads' insmod /lib/ringfence-lent-pool.ko pools=0000:00:10.0
check_cards
check 'the card lends by DMA operations' features_are_negotiated 33
check 'it says what it sees' grep 'lent 64 MiB' /share/card.log
hide_secret
found=$(scan card exchange)
check_unseen 'the card' "$found"
check 'it sees the pool' test "$(echo "$found" | cut -d ' ' -f 6)" -gt "$(echo "$found" | cut -d ' ' -f 4)"
check_kernel
complete_scenario
