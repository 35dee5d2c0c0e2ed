# title: a PV guest issues and revokes pages of a window, for a PVH grantee and for mode `window` of a network
# group: window-long
# set: name
# machine: xen-pvh
# limit: 400
# grants: bad
# driver: window-tests

. /vm/xen/window.sh

before=$(free_memory)
check 'a PV granter is created' create_window_guest one || give_up 'without a granter there is nothing to see'
check 'a grantee is created' create_window_guest two 'type="pvh"' || give_up 'without a grantee there is nothing to see'
granter_id=$(domain_id one) grantee_id=$(domain_id two)
matches 'a window is created' "$(granter create $grantee_id 64)" 'rc 0 status 0 handle 0'
grantee dev-open >/dev/null
matches 'it registers' "$(grantee dev-register $granter_id 0 64)" ok
granter fill 0 hello-from-a-pv-guest >/dev/null
matches 'a page is issued' "$(granter issue 0 5 0 0)" '*ok 1*'
is 'the grantee reads it' "$(grantee read 5)" hello-from-a-pv-guest
grantee write 5 WRITTEN >/dev/null
matches 'the grantee writes it' "$(granter peek 0)" 'WRITTEN*'
matches 'the page is revoked' "$(granter revoke 0 5 0)" '*ok 1*'
is 'it is gone' "$(grantee read 5)" gone
grantee write 5 AFTER >/dev/null
matches 'writes no longer reach it' "$(granter peek 0)" 'WRITTEN*'

# The type of a page: what may be written by another domain is no page table, and what is issued becomes none.
matches 'a page table of the granter is not issued' "$(granter issue-table 0 6 0)" '*status -9'
matches 'it is issued read-only' "$(granter issue-table 0 6 1)" '*status 0'
matches 'and revoked' "$(granter revoke 0 6 0)" '*ok 1*'
matches 'frames of other domains are not issued' "$(granter issue-gfn 0 7 0x100 1)" '*status -9'
matches 'many pages are issued and revoked' "$(granter issue 0 0 0 0 64) $(granter revoke 0 0 0 64)" '*ok 64*ok 64*'

# Deaths with pages that are issued.
matches 'pages are issued again' "$(granter issue 0 0 0 0 64)" '*ok 64*'
xl destroy one
check 'the granter leaves no zombie' wait_for 30 domain_is_gone $granter_id
is 'its pages are gone' "$(grantee read 5)" gone
xl destroy two
check 'nor does the grantee' wait_for 30 only_dom0_is_left
is 'the memory is free again' "$(free_memory)" "$before"

guests_with window
create_driver_domain '[network]\nmode = "window"\n'
create_guest_with_windows one 11 1 pv
operations=$(driver_domain_operations)
check_transfer 'PV guest to driver domain' one net $ADDRESS 4
check_transfer 'driver domain to PV guest' net one 10.77.0.11 4
is 'no packet costs a grant operation' $(($(driver_domain_operations) - operations)) 0
for each in one net; do xl destroy $each; done
check 'the domains leave no zombie' wait_for 30 only_dom0_is_left
check 'no window is left' no_windows
is 'the memory is free again after the traffic' "$(free_memory)" "$before"
complete_scenario
