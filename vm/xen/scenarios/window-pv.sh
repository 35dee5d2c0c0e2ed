# title: a PV guest issues and revokes pages of a window, for a PVH grantee and for mode `window` of a network
# group: window-long
# set: name
# machine: xen-pvh
# limit: 400
# grants: bad
# driver: window-tests

. /vm/xen/window.sh

before=$(free_memory)
check 'a PV granter is created' window_guest one || give_up 'without a granter there is nothing to see'
check 'a grantee is created' window_guest two 'type="pvh"' || give_up 'without a grantee there is nothing to see'
A=$(domain one) B=$(domain two)
like 'a window is created' "$(a create $B 64)" 'rc 0 status 0 handle 0'
b dev-open >/dev/null
like 'it registers' "$(b dev-register $A 0 64)" ok
a fill 0 hello-from-a-pv-guest >/dev/null
like 'a page is issued' "$(a issue 0 5 0 0)" '*ok 1*'
is 'the grantee reads it' "$(b read 5)" hello-from-a-pv-guest
b write 5 WRITTEN >/dev/null
like 'the grantee writes it' "$(a peek 0)" 'WRITTEN*'
like 'the page is revoked' "$(a revoke 0 5 0)" '*ok 1*'
is 'it is gone' "$(b read 5)" gone
b write 5 AFTER >/dev/null
like 'writes no longer reach it' "$(a peek 0)" 'WRITTEN*'

# The type of a page: what may be written by another domain is no page table, and what is issued becomes none.
like 'a page table of the granter is not issued' "$(a issue-table 0 6 0)" '*status -9'
like 'it is issued read-only' "$(a issue-table 0 6 1)" '*status 0'
like 'and revoked' "$(a revoke 0 6 0)" '*ok 1*'
like 'frames of other domains are not issued' "$(a issue-gfn 0 7 0x100 1)" '*status -9'
like 'many pages are issued and revoked' "$(a issue 0 0 0 0 64) $(a revoke 0 0 0 64)" '*ok 64*ok 64*'

# Deaths with pages that are issued.
like 'pages are issued again' "$(a issue 0 0 0 0 64)" '*ok 64*'
xl destroy one
check 'the granter leaves no zombie' wait_for 30 is_not_there $A
is 'its pages are gone' "$(b read 5)" gone
xl destroy two
check 'nor does the grantee' wait_for 30 alone
is 'the memory is free again' "$(free_memory)" "$before"

guests_with window
driver_domain '[network]\nmode = "window"\n'
TYPE=pv
attached_windows one 11
operations=$(operations_of_driver)
transfer 'PV guest to driver domain' one net $ADDRESS 4
transfer 'driver domain to PV guest' net one 10.77.0.11 4
is 'no packet costs a grant operation' $(($(operations_of_driver) - operations)) 0
for each in one net; do xl destroy $each; done
check 'the domains leave no zombie' wait_for 30 alone
check 'no window is left' windows_none
is 'the memory is free again after the traffic' "$(free_memory)" "$before"
complete
