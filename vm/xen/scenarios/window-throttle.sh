# title: a granter's flushes are bounded, and teardown is not
# set: name
# machine: xen-pvh
# limit: 300
# options: gnttab_window_flush_rate=2
# driver: window-tests
# hypervisor: debug

. /vm/xen/window.sh

before=$(free_memory)
check 'a granter is created' create_window_guest one 'type="pvh"' || give_up 'without a granter there is nothing to see'
check 'a grantee is created' create_window_guest two 'type="pvh"' || give_up 'without a grantee there is nothing to see'
granter_id=$(domain_id one) grantee_id=$(domain_id two)
matches 'a window is created' "$(granter create $grantee_id 1024)" 'rc 0 status 0 handle 0'
grantee dev-open >/dev/null
matches 'it registers' "$(grantee dev-register $granter_id 0 1024)" ok
matches 'a thousand pages are issued' "$(granter issue 0 0 100 0 1000)" 'rc 0 ok 1000*'
sleep 2
# Two flushes of 64 pages each are there, and a third may be earned meanwhile.
matches 'few of them are revoked in one call, and the rest is to be tried again' "$(granter revoke 0 0 0 1000)" 'rc 0 ok 1[29][28] other -12'
matches 'nor has force another budget' "$(granter revoke 0 300 1 700)" 'rc 0 ok * other -12'
left=$(grantee count 0 1024)
matches 'the grantee has the others' "$left" 'gone * zero [1-9]*'
note "$left"
matches 'the hypervisor counts the refusals' "$(dump_windows | grep 'throttled')" '* [1-9]* throttled'
sleep 2
matches 'later more are revoked' "$(granter revoke 0 500 0 64)" 'rc 0 ok 64*'
check 'the grantee is destroyed' xl destroy two
check 'it leaves no zombie: teardown has no budget' wait_for 20 domain_is_gone $grantee_id
check 'the granter is destroyed' xl destroy one
check 'it leaves no zombie' wait_for 20 domain_is_gone $granter_id
is 'the memory is free again' "$(free_memory)" "$before"
complete_scenario
