# title: a security policy that forbids grants between guests forbids windows
# set: name
# machine: xen-pvh
# limit: 200
# options: xsm=silo
# driver: window-tests
# hypervisor: debug

. /vm/xen/window.sh

check 'a granter is created' create_window_guest one 'type="pvh"' || give_up 'without a granter there is nothing to see'
check 'a grantee is created' create_window_guest two 'type="pvh"' || give_up 'without a grantee there is nothing to see'
matches 'the operations are there' "$(granter query)" 'rc 0 version 1 *'
matches 'a window between guests is refused' "$(granter create $(domain_id two) 64)" '*status -8*'
check 'the hypervisor has no window' no_windows
complete_scenario
