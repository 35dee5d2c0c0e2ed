# title: a guest that reboots, and migrates to its own host; on a bridge, and on the daemon's switch
# set: all
# machine: xen
# limit: 200
# hypervisor: debug

# Debian's Xen is built without what logs the dirty pages of a PV guest, so that none migrates on it.

# is_another_domain NAME DOMAIN: succeeds if the guest exists with another number than DOMAIN.
is_another_domain() {
    local now=$(domain_id $1)
    [ -n "$now" ] && [ "$now" != $2 ]
}

# check_reboot NAME N: checks that a guest has its network after a reboot, and that nothing of its old domain is left.
check_reboot() {
    local before=$(domain_id $1)
    on $1 '(usleep 300000; reboot -f) >/dev/null 2>&1 &'
    check "$1 reboots" wait_for 40 is_another_domain $1 $before
    check "$1 has a network again" start_network $1 $2
    check "nothing is left of what $1 was before it rebooted" wait_for 10 nothing_left $before
}

# check_migration NAME: checks that a connection survives a migration to this computer, and that nothing of the old
# domain is left. Both domains have an interface with the same address for a moment.
check_migration() {
    local before=$(domain_id $1)
    on $1 "{ traffic pulse $ADDRESS 7000 40 >/tmp/pulse.new 2>&1; mv /tmp/pulse.new /tmp/pulse; } &"
    check "$1 migrates, to where it is" xl migrate -s '' $1 'xl migrate-receive'
    check "$1 is another domain" is_another_domain $1 $before
    find_console $1
    check "$1: the connection is still under way" on $1 'pidof traffic'
    check "$1: it goes on" wait_for 60 on $1 'grep -E "^[0-9]+ [0-9]+$" /tmp/pulse'
    note "exchanges and longest silence in ms: $(on $1 'cat /tmp/pulse; rm /tmp/pulse')"
    check_transfer "$1 to dom0, after migrating" $1 dom0 $ADDRESS 8
    check "nothing is left of what $1 was before it migrated" wait_for 10 nothing_left $before
}

use_ringfence
traffic echo 7000 &
create_networked_guest one 11
check_reboot one 11
check_migration one
check_destruction one

kill $SERVE
check 'the daemon ends when it is told to' wait $SERVE
write_configuration '[network]' 'attach = "switch"' 'host-interface = "rf-host"'
check 'one with a switch starts' start_daemon
check 'the host has its leg on it' ip link set rf-host master xenbr0 up
create_networked_guest one 11
check_reboot one 11
check_migration one
check 'the daemon is still the same' test -d /proc/$SERVE
check_destruction one
complete_scenario
