# title: our driver in a guest, against a backend that breaks the protocol: the link goes down with a reason
# set: all
# machine: xen
# limit: 300
# driver: netfront

. /vm/xen/driver.sh

# attack_rings ATTACK: kills the daemon, and attacks the rings of the guest's only queue in its place.
attack_rings() {
    local front=/local/domain/$(domain_id one)/device/vif/0
    kill -9 $SERVE
    wait $SERVE
    on one "ping -c 3 -W 1 $ADDRESS >/dev/null 2>&1 &"
    hostile-backend $(domain_id one) $(read_key $front/tx-ring-ref) $(read_key $front/rx-ring-ref) $(read_key $front/event-channel-rx) $1
}

# fault_is_logged REASON: waits until the guest's kernel logs a fault of the backend with this reason.
fault_is_logged() {
    on one "wait_for 20 sh -c 'dmesg | grep -q \"broke the protocol.*$1\"'"
}

# link_is_down: waits until the guest's interface has no carrier.
link_is_down() {
    on one 'wait_for 10 grep -q 0 /sys/class/net/eth0/carrier'
}

# repair_link: starts the daemon, and connects the driver to it by a rebinding.
repair_link() {
    start_daemon && change_driver one 11 $DRIVER $DRIVER && on one 'dmesg -c >/dev/null'
}

# check_attack ATTACK REASON: checks that an attack takes the link down with this reason and has no other effect. Ends
# the scenario if the link cannot be repaired.
check_attack() {
    check "$1: done" attack_rings $1
    check "$1: the guest says so" fault_is_logged "$2" || on one 'dmesg | tail -n 5'
    check "$1: the link is down" link_is_down
    check_not "$1: no other complaint" on one "dmesg | grep -E 'BUG|WARNING|Oops|Call Trace'"
    repair_link || give_up "after $1 the network does not come back"
}

(cd / && cpio -id usr/bin/hostile-backend </boot/driver.cpio) 2>/dev/null
use_ringfence
guests_with tools driver
create_guest_with_our_driver one 11
check_attack tx-index 'TX response index'
check_attack tx-id 'TX response with an id'
check_attack tx-idle-id 'TX response'
check_attack tx-null 'TX response to an extra info'
check_attack rx-index 'RX response index'
check_attack rx-id 'id of another slot'
check_attack rx-offset 'beyond its page'
check_attack rx-size 'beyond its page'
check_attack rx-slots 'too many slots'
check_attack rx-extras 'too many extra infos'

check 'strange packets: done' attack_rings rx-strange
check_not 'strange packets: no complaint' on one "dmesg | grep -E 'BUG|WARNING|Oops|Call Trace'"
complete_scenario
