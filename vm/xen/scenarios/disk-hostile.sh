# title: a guest breaks every rule of a disk, from user space: dom0 and another guest's disk go on
# set: all
# machine: xen
# limit: 150
# grants: bad

# unbind_blkfront: takes the disk from the kernel's driver, and lets a program of the guest grant enough pages.
unbind_blkfront() {
    on hostile 'echo vbd-51712 >/sys/bus/xen/drivers/vbd/unbind && load_modules xenfs && echo 4096 >/sys/module/xen_gntalloc/parameters/limit'
}

# other_guest_continues: puts load on the other guest's disk, with every sector compared, until the attack has ended.
other_guest_continues() {
    local rounds=0
    while ! on hostile 'test -s /tmp/hostile.status'; do
        run_load good /dev/xvda --seconds 1 --mebibytes 8 || return 1
        rounds=$((rounds + 1))
    done
    echo "$rounds rounds meanwhile"
    [ $rounds -gt 0 ]
}

attack_succeeded() {
    on hostile 'cat /tmp/hostile.log; exit $(cat /tmp/hostile.status)'
}

# violated_rules NAME: prints the number of kinds of rules that the guest's disk has violated.
violated_rules() {
    disk_status $1 '/"rules": \{/ { inside = 1; next } /\}/ { inside = 0 } inside { count++ } END { print count + 0 }'
}

use_disks
guests_with tools bench
create_image good 32
create_image hostile 16
create_guest_with_disk good good
create_guest_with_disk hostile hostile
check 'its own driver lets go of the disk' unbind_blkfront
on hostile "{ ringfence-bench internal hostile-guest --disk --handle 51712 --seconds 1 >/tmp/hostile.log 2>&1; echo \$? >/tmp/hostile.status; } &"
check 'the other guest goes on meanwhile' other_guest_continues
check 'the hostile guest did its worst, and each answer was the right one' attack_succeeded
check 'the daemon is still the same' test -d /proc/$SERVE
note "kinds of rules it is charged with: $(violated_rules hostile)"
check 'it is charged with what it did' test "$(violated_rules hostile)" -gt 6
is 'the other guest is not' "$(violated_rules good)" 0
check_filesystem good
check_not 'dom0 has nothing to complain of' on dom0 "dmesg | grep -E 'BUG|WARNING|Oops|Call Trace'"
check_not 'nor has the other guest' on good "dmesg | grep -E 'I/O error|BUG|WARNING|disabled for further use'"
check_destruction hostile
check_destruction good
complete_scenario
