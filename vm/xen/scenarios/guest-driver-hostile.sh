# title: our driver in a guest, against a backend that breaks the protocol: the link goes down with a reason
# set: all
# machine: xen
# limit: 300
# driver: netfront

. /vm/xen/driver.sh

# taken_over DEED: the daemon dies, and the hostile backend has the rings of the guest's only queue.
taken_over() {
    local front=/local/domain/$(domain one)/device/vif/0
    kill -9 $SERVE
    wait $SERVE
    on one "ping -c 3 -W 1 $ADDRESS >/dev/null 2>&1 &"
    hostile-backend $(domain one) $(key $front/tx-ring-ref) $(key $front/rx-ring-ref) $(key $front/event-channel-rx) $1
}

# says REASON: the guest's kernel has logged it.
says() {
    on one "wait_for 20 sh -c 'dmesg | grep -q \"broke the protocol.*$1\"'"
}

# down: the link is.
down() {
    on one 'wait_for 10 grep -q 0 /sys/class/net/eth0/carrier'
}

# repaired: the daemon is back, and the driver, unbound and bound, connects to it.
repaired() {
    serve && bound_again one 11 $DRIVER $DRIVER && on one 'dmesg -c >/dev/null'
}

# breaks DEED REASON: 4 checks.
breaks() {
    check "$1: done" taken_over $1
    check "$1: the guest says so" says "$2" || on one 'dmesg | tail -n 5'
    check "$1: the link is down" down
    check_not "$1: no other complaint" on one "dmesg | grep -E 'BUG|WARNING|Oops|Call Trace'"
    repaired || give_up "after $1 the network does not come back"
}

(cd / && cpio -id usr/bin/hostile-backend </boot/driver.cpio) 2>/dev/null
use_ringfence
guests_with tools driver
driven one 11
breaks tx-index 'TX response index'
breaks tx-id 'TX response with an id'
breaks tx-idle-id 'TX response'
breaks tx-null 'TX response to an extra info'
breaks rx-index 'RX response index'
breaks rx-id 'id of another slot'
breaks rx-offset 'beyond its page'
breaks rx-size 'beyond its page'
breaks rx-slots 'too many slots'
breaks rx-extras 'too many extra infos'

check 'strange packets: done' taken_over rx-strange
check_not 'strange packets: no complaint' on one "dmesg | grep -E 'BUG|WARNING|Oops|Call Trace'"
complete
