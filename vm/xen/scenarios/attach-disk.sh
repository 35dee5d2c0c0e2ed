# title: `ringfence attach --disk` in a guest, served by `ringfence serve`
# set: all
# machine: xen
# limit: 200
# parts: fio

use_disks
guests_with tools fio
MEMORY=352
create_image one 16
head -c 16777216 /dev/urandom >$DISKS/other
check 'a guest with two disks is created' create_guest one "disk=[$(disk_line xvda one),$(disk_line xvdb other)]" ||
    give_up "$(tail -n 3 /var/log/xen/*.log /share/serve-$SCENARIO.log)"
check 'it has the first disk' has_disk one xvda
check 'and the second' on one 'wait_for 20 test -b /dev/xvdb'
check_attached_disk one $DISKS/other
check_destruction one
complete_scenario
