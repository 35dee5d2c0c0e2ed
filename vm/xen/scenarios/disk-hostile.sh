# title: a guest breaks every rule of a disk, from user space: dom0 and another guest's disk go on
# set: all
# machine: xen
# limit: 150
# grants: bad

# Its own driver lets go of the disk, and the hostile one may lend enough pages.
unbind() {
    on rogue 'echo vbd-51712 >/sys/bus/xen/drivers/vbd/unbind && load xenfs && echo 4096 >/sys/module/xen_gntalloc/parameters/limit'
}

# Until it has done its worst, the other guest's sectors are written, read and compared.
goes_on() {
    local rounds=0
    while ! on rogue 'test -s /tmp/hostile.status'; do
        load_on good /dev/xvda --seconds 1 --mebibytes 8 || return 1
        rounds=$((rounds + 1))
    done
    echo "$rounds rounds meanwhile"
    [ $rounds -gt 0 ]
}

did_its_worst() {
    on rogue 'cat /tmp/hostile.log; exit $(cat /tmp/hostile.status)'
}

# rules NAME: how many kinds of rules the disk of a guest is charged with.
rules() {
    of_disk $1 '/"rules": \{/ { inside = 1; next } /\}/ { inside = 0 } inside { count++ } END { print count + 0 }'
}

use_disks
guests_with tools bench
image good 32
image rogue 16
with_disk good
with_disk rogue
check 'its own driver lets go of the disk' unbind
on rogue "{ ringfence-bench internal hostile-guest --disk --handle 51712 --seconds 1 >/tmp/hostile.log 2>&1; echo \$? >/tmp/hostile.status; } &"
check 'the other guest goes on meanwhile' goes_on
check 'the hostile guest did its worst, and each answer was the right one' did_its_worst
check 'the daemon is still the same' test -d /proc/$SERVE
note "kinds of rules it is charged with: $(rules rogue)"
check 'it is charged with what it did' test "$(rules rogue)" -gt 6
is 'the other guest is not' "$(rules good)" 0
filesystem good
check_not 'dom0 has nothing to complain of' on dom0 "dmesg | grep -E 'BUG|WARNING|Oops|Call Trace'"
check_not 'nor has the other guest' on good "dmesg | grep -E 'I/O error|BUG|WARNING|disabled for further use'"
gone rogue
gone good
complete
