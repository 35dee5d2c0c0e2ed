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
check 'a granter is created' create_window_guest one 'type="pvh"' || give_up 'without a granter there is nothing to see'
check 'a grantee is created' create_window_guest two 'type="pvh"' || give_up 'without a grantee there is nothing to see'
granter_id=$(domain_id one) grantee_id=$(domain_id two)
matches 'a window is created' "$(granter create $grantee_id 64)" 'rc 0 status 0 handle 0'
grantee dev-open >/dev/null
matches 'it registers' "$(grantee dev-register $granter_id 0 64)" ok
matches 'pages are issued' "$(granter issue 0 0 100 0 10)" 'rc 0 ok 10*'
matches 'the revocation says that they may still be mapped' "$(granter revoke 0 0 0 10)" 'rc 0 ok 0 other -1'
check 'the grantee is crashed' wait_for 20 domain_is_gone $grantee_id
check 'no window is left: teardown flushes again' wait_for 10 no_windows
matches 'the granter lives' "$(granter create 0 64)" '*status -2*'
xl destroy one
check 'all domains are gone, so the pages were released' wait_for 30 only_dom0_is_left
is 'the memory is free again' "$(free_memory)" "$before"
complete_scenario
