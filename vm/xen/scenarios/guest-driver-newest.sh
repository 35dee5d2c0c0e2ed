# title: our driver with the newest Debian kernel and four queues: 256 MiB each way, ethtool, a restart, rebinding
# set: all
# machine: xen
# limit: 400
# driver: netfront
# kernel: newest

. /vm/xen/staging.sh
. /vm/xen/driver.sh

toggles() {
    on one 'for round in 1 2 3; do for what in tso gso tx rx gro sg; do
        ethtool -K eth0 $what off; usleep 100000; ethtool -K eth0 $what on; done; done'
}

# used COUNTER: each of the four queues has counted something.
used() {
    local queue
    for queue in 0 1 2 3; do
        [ "$(counter one "$1${queue}_packets")" -gt 0 ] || return 1
    done
}

use_ringfence '[network]' 'mode = "staging"' 'max-queues = 4'
guests_with tools driver newest
KERNEL=/boot/vmlinuz-newest MEMORY=320 VCPUS=4
driven one 11
note "$(on one 'uname -r' | tr -d '\r')"
check 'its kernel is not that of dom0' test "$(on one 'uname -r' | tr -d '\r')" != "$(uname -r)"
STAGED=2048
check 'the pages of four queues are staged' wait_for 40 all_staged one
# This kernel's packets are longer, and so fewer.
no_operations 'four queues' one 11 0 32
transfer '256 MiB: one to dom0' one dom0 $ADDRESS 256
transfer '256 MiB: dom0 to one, IPv6' dom0 one fd77::11 256
on one '{ traffic echo 7200 >/dev/null 2>&1; } &'
check 'many connections' traffic many 10.77.0.11 7200 48 64
check 'each queue sends' used tx
check 'each queue receives' used rx
returns one
check 'datagrams of every length come back' traffic datagrams 10.77.0.11 7100 200
during 'killed and started' one 11 24 killed_and_started
check 'the link stayed' connected one
during 'features switched off and on' one 11 24 toggles
check 'the features are back' on one 'ethtool -k eth0 | grep "^tcp-segmentation-offload: on"'
check 'hashing over queue 1 alone' on one 'ethtool -X eth0 start 1 equal 1'
transfer 'hashed: dom0 to one' dom0 one 10.77.0.11 8
check 'queue 1 had it' on one 'test $(ethtool -S eth0 | awk "/rx1_packets/ { print \$2 }") -gt 50'
rebound one 11 3
check 'the pages are staged again' wait_for 40 all_staged one
is 'no fault of the backend was counted' "$(counter one backend_faults)" 0
healthy one
gone one
complete
