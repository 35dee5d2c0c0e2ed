# title: a machine's network card on `passt --vhost-user`: what a stream carries, and the offloads of a Linux driver
# set: all
# machine: linux-vhost-user
# limit: 90

. /vm/linux/passt.sh
check_card
check 'checksums are left to the other side' features_are_negotiated 0 1
check 'super-packets leave and arrive whole' features_are_negotiated 7 8 11 12
check 'buffers are merged' features_are_negotiated 15
check 'notifications are requested by index' features_are_negotiated 29
# For comparison with the scenario `lent-pool`.
check_seen 'passt' "$(scan_passt)"
complete_scenario
