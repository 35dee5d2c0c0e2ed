# title: cards on `vhost-user net` behind `shield`: what `vhost-user-net` checks, kills of the shield, and no secret is seen
# set: all
# group: vhost-user-net
# machine: linux-shield-net
# limit: 240

. /vm/linux/net.sh
check_cards
check_kills_of_card card-shield
check 'the backend says what it sees' grep 'lent 64 MiB' /share/card.log
hide_secret
check_unseen 'the backend of the card' "$(scan card exchange)"
check_seen 'the shield, which is trusted' "$(scan card-shield exchange)"
check_kernel
complete_scenario
