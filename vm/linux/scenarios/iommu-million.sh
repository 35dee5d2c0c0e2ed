# title: a million packets from and to pages that are revoked and issued at random, by vhost-net
# set: all
# machine: linux
# limit: 240

load_modules vhost_net tun
check 'vhost-net has its device' test -c /dev/vhost-net || give_up 'nothing to drive'
check 'every packet is as it was sent' engines iotlb traffic 1000000
check 'what was revoked while packets come in is not written' engines iotlb canary 300
complete_scenario
