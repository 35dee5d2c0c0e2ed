# title: the guest's pages are mapped instead of copied
# set: core
# machine: xen
# limit: 60

use_ringfence '[network]' 'mode = "map"'
create_networked_guest one 11
check 'ringfence status says so' on dom0 'ringfence status | grep -q map'
check_streams one 11 8
# A guest cannot take a page back alone here: asked for windows, the daemon says so and stages.
check 'windows are asked for' reload_daemon '[network]' 'mode = "window"'
create_networked_guest two 12
check 'that there are none is said, with the reason' wait_for 10 on dom0 "grep -q 'no windows: this platform has no windows' /share/serve-$SCENARIO.log"
check 'and the next mode is used' on dom0 'ringfence status | grep -q staging'
check_transfer 'to that guest' dom0 two 10.77.0.12 4
complete_scenario
