# title: the same on the daemon's own switch, which copies from guest to guest
# set: all
# machine: xen
# limit: 60

use_ringfence '[network]' 'attach = "switch"' 'host-interface = "rf-host"'
check 'the host has its leg on the switch' ip link set rf-host master xenbr0 up
check_two_guests 8
complete_scenario
