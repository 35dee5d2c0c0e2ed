# title: a page whose flush fails is not released while its grantee lives
# set: name
# machine: xen-pvh
# limit: 300
# options: window_fail=1
# driver: window-tests
# grants: bad
# report: a page cannot be unmapped
# hypervisor: guards

. /vm/xen/window.sh

before=$(free_memory)
check 'a granter is created' window_guest one 'type="pvh"' || give_up 'without a granter there is nothing to see'
check 'a grantee is created' window_guest two 'type="pvh"' || give_up 'without a grantee there is nothing to see'
A=$(domain one) B=$(domain two)
like 'a window is created' "$(a create $B 64)" 'rc 0 status 0 handle 0'
b dev-open >/dev/null
like 'it registers' "$(b dev-register $A 0 64)" ok
like 'pages are issued' "$(a issue 0 0 100 0 10)" 'rc 0 ok 10*'
like 'the revocation says that they may still be mapped' "$(a revoke 0 0 0 10)" 'rc 0 ok 0 other -1'
check 'the grantee is crashed' wait_for 20 is_not_there $B
check 'no window is left: teardown flushes again' wait_for 10 windows_none
like 'the granter lives' "$(a create 0 64)" '*status -2*'
xl destroy one
check 'all domains are gone, so the pages were released' wait_for 30 alone
is 'the memory is free again' "$(free_memory)" "$before"
complete
