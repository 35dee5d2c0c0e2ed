# title: limits of guests, on a machine that has cgroups of version 2 alone
# set: all
# machine: linux-programs
# limit: 120
# tests: guests

. /vm/linux/computer.sh
check 'the files of the computer are there' enter_computer || give_up 'no programs'
check 'guests can be made of them' can_have_guests || give_up 'no guests'
check 'the hierarchy of version 2 is mounted' mount -t cgroup2 none $COMPUTER/sys/fs/cgroup || give_up 'no cgroups'
check 'it has the controllers' grep -w memory $COMPUTER/sys/fs/cgroup/cgroup.controllers
check_cases guests limits::
umount $COMPUTER/sys/fs/cgroup
complete_scenario
