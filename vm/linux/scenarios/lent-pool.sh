# title: a network card on `passt --vhost-user --require-pool` by the module lent-pool: what vhost-user carries, and passt sees no secret
# set: core
# machine: linux-lent-pool
# driver: lent-pool
# limit: 120

. /vm/linux/passt.sh
driver=/lib/ringfence-lent-pool.ko
card=0000:00:11.0
mount -t debugfs debug /sys/kernel/debug
counters=/sys/kernel/debug/ringfence-lent-pool/0000:00:10.0
# counter NAME: prints a counter of the pool.
counter() { sed -n "s/^ *$1: //p" $counters; }
# exchange: configures the card, and exchanges data with the host.
exchange() {
    wait_for 10 test -e /sys/class/net/eth0 && ip link set eth0 up &&
        udhcpc -i eth0 -n -q -t 10 -s /vm/linux/on-lease && traffic many 192.0.2.80 7003 10 512
}

check 'the module loads' insmod $driver
check_not 'shared memory without a mark is no pool' test -e $counters
check 'the module is removed' rmmod ringfence-lent-pool
check 'a pool can be named' insmod $driver pools=0000:00:10.0 devices=$card
check 'it is there' test -e $counters || give_up 'no pool'
is 'the card uses it' "$(counter devices)" 1
check_card
check 'the card lends by DMA operations' features_are_negotiated 33
check 'checksums and super-packets are left to the other side' features_are_negotiated 0 1 7 8 11 12
check 'data were copied out' test "$(counter bytes_to_device)" -gt 50000000
check 'data were copied in' test "$(counter bytes_from_device)" -gt 25000000
found=$(scan_passt)
check_unseen 'passt' "$found"
# Each process has the mark in its program.
check 'it sees the pool' test "$(echo "$found" | cut -d ' ' -f 6)" -gt "$(echo "$found" | cut -d ' ' -f 4)"
is 'each mapping was a slot' "$(counter bad_unmaps)" 0
note "$(tr -s ' \n' ' ' <$counters)"

virtio=$(readlink -f /sys/class/net/eth0/device)
virtio=${virtio##*/}
echo $virtio >/sys/bus/virtio/drivers/virtio_net/unbind
is 'rings are freed with their driver' "$(counter coherent_bytes)" 0
echo $virtio >/sys/bus/virtio/drivers/virtio_net/bind
check 'the driver binds again' exchange
echo $card >/sys/bus/pci/drivers/virtio-pci/unbind
is 'a function without a driver has no pool' "$(counter devices)" 0
echo $card >/sys/bus/pci/drivers/virtio-pci/bind
check 'the function binds again' exchange
check 'the module is removed from a card' rmmod ringfence-lent-pool
check_not 'which has no driver then' test -e /sys/class/net/eth0
check 'the module comes back, and finds the pool by its mark' insmod $driver devices=$card
check 'and so does the card' exchange
check_kernel
complete_scenario
