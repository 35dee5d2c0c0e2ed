# title: a security policy that forbids grants between guests forbids windows
# set: name
# machine: xen-pvh
# limit: 200
# options: xsm=silo
# driver: window-tests
# hypervisor: debug

. /vm/xen/window.sh

check 'a granter is created' window_guest one 'type="pvh"' || give_up 'without a granter there is nothing to see'
check 'a grantee is created' window_guest two 'type="pvh"' || give_up 'without a grantee there is nothing to see'
like 'the operations are there' "$(a query)" 'rc 0 version 1 *'
like 'a window between guests is refused' "$(a create $(domain two) 64)" '*status -8*'
check 'the hypervisor has no window' windows_none
complete
