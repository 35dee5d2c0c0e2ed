# title: cards of passt and testpmd behind `pool-proxy`, by the module lent-pool: data, kills; no secret is seen
# set: name
# group: foreign-net
# machine: linux-lent-pool-foreign-net
# driver: lent-pool
# limit: 300

. /vm/linux/foreign.sh
check 'the module loads' insmod /lib/ringfence-lent-pool.ko pools=0000:00:10.0
check_passt passt-proxy
check_testpmd testpmd eth1 10.79.0
check 'the card lends by DMA operations' features_are_negotiated 33
hide_secret
check_unseen 'passt' "$(scan passt exchange)"
check_unseen 'testpmd' "$(scan_testpmd testpmd 10.79.0)"
check_unseen 'the proxy' "$(scan passt-proxy exchange)"
check_kernel
complete_scenario
